"""Which checkpoints a folder holds, and whether they are whole. No torch: the launcher's side looks too."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json

MANIFEST = "manifest.json"
BEST = "best"
VALIDATE = "train.validate_every=N and checkpoint.keep_best=true keep one, of the steps from then on"
BEGUN = ".begun"  # a run began anew in this folder, and no checkpoint has its name there yet
_NAME = re.compile(r"step-[0-9]+")


def is_whole(path: Path) -> bool:
    """Whether this folder is a committed checkpoint: the manifest comes last and the name after it."""
    return path.suffix == "" and (path / MANIFEST).is_file()


def whole_ones(folder: Path) -> list[Path]:
    """All whole checkpoints of a folder, oldest first; not a person's copies beside them (`step-00000200-good`)."""
    return [path for _, path in sorted(_numbered(folder)) if is_whole(path)]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    return [(int(p.name.removeprefix("step-")), p) for p in folder.glob("step-*") if _NAME.fullmatch(p.name)]


def newest(folder: Path) -> Path | None:
    """The latest whole checkpoint of a folder, if there is one."""
    return next(reversed(whole_ones(folder)), None)


def name_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:08d}"


def of_step(folder: Path, word: str) -> Path:
    """A folder's whole checkpoint of a step: its number, or `best`, by the validations until the newest one.

    Raises ConfigError where there is none.
    """
    step = step_in(word) if word != BEST else _best_step(folder)
    path = folder / name_of(step)
    if not is_whole(path):
        there = ", ".join(str(int(p.name.removeprefix("step-"))) for p in whole_ones(folder)) or "none"
        lost = "the best validation was there: checkpoint.keep_best=true keeps it; " if word == BEST else ""
        raise ConfigError(f"{folder} has no checkpoint of step {step}", hint=f"{lost}there are: {there}")
    return path


def step_in(word: str) -> int:
    """The number that is given as a step. Raises ConfigError."""
    if not word.isdecimal():
        raise ConfigError(f"'{word}' is not a step", hint="a number, or best: that of the lowest validation loss")
    return int(word)


def _best_step(folder: Path) -> int:
    latest = newest(folder)
    try:
        best = read_json(latest / MANIFEST).get("best", {}) if latest else {}
        if best.get("loss") is None:
            raise no_best(folder)
        return int(best["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{latest}/{MANIFEST} cannot be read as a checkpoint's manifest: {error}") from None


def no_best(where: Path) -> ConfigError:
    """No validation says which checkpoint is the best one."""
    return ConfigError(f"{where} knows no best checkpoint: no validation was before its newest", hint=VALIDATE)


def set_aside(folder: Path, *, beyond: int) -> Path | None:
    """Move what a folder has of steps beyond one into a folder of its own, and return that; None if nothing was there.

    A run that begins at an earlier step makes those anew: they are of another training, and neither it nor the one who
    continues may take them for its own.
    """
    later = [path for step, path in _numbered(folder) if step > beyond]
    if not later:
        return None
    apart = next(p for n in itertools.count(1) if not (p := folder / f"superseded-{n}").exists())
    apart.mkdir()
    for path in later:
        os.replace(path, apart / path.name)
    return apart


def previous(path: Path) -> Path | None:
    """The whole checkpoint before this one, if there is one."""
    return next((p for p in reversed(whole_ones(path.parent)) if p.name < path.name), None)
