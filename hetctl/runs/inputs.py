"""The files that ranks read: those that every host must have, and those that are sent (`data.ship`)."""

from __future__ import annotations

from pathlib import Path

from hetctl.launcher.supervisor.ship import Shipment
from hetctl.trainer.data.sources import beside_tokenizer, settings_beside, source_files
from hetctl.trainer.recipe import DataSection, Recipe


def paths_to_read(recipe: Recipe, resume: str) -> list[str]:
    """What every host must be able to read: data and tokenizer unless they are sent, a checkpoint that was named."""
    data = [] if recipe.data.ship else _data_paths(recipe.data)
    return [str(path.resolve()) for path in (*data, *(() if resume in ("auto", "never") else (Path(resume),)))]


def shipments(recipe: Recipe) -> list[Shipment]:
    """What `data.ship` sends. Raises ConfigError where it is not here."""
    if not recipe.data.ship:
        return []
    return [Shipment(path, _files(path, recipe.data)) for path in _data_paths(recipe.data)]


def _files(path: Path, data: DataSection) -> tuple[Path, ...]:
    for one in data.each:
        if str(path) == one.source:
            return tuple(source_files(one))
    if str(path) != data.tokenizer:
        return (path,)
    settings = settings_beside(data.tokenizer)
    return (path, *beside_tokenizer(data.tokenizer), *([settings] if settings else ()))


def _data_paths(data: DataSection) -> list[Path]:
    return [Path(path) for path in data.paths]
