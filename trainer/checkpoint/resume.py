"""Whether a checkpoint may be gone on from: it is of this model, and its data went before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.files import read_yaml
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import Recipe, load_recipe

ORDER_OF_SAMPLES = (  # a run goes on at sample step x global_batch of the order that these make
    ("data", "source"),
    ("data", "tokenizer"),
    ("data", "field"),
    ("data", "seed"),
    ("data", "validation_share"),
    ("model", "seq_len"),
    ("batch", "global_batch"),
)


def check_goes_on(
    recipe: Recipe,
    shape: ModelShape,
    start: Path,
    *,
    base: str | None,
    recorded: Path | None,
    warn: Callable[[str], None],
) -> None:
    """Raise ConfigError where the checkpoint to go on from is of another model; say where its data were others.

    `recorded` is the recipe.yaml of the run that made it, where that is at hand.
    """
    if listing.is_whole(start):
        from hetctl.trainer.checkpoint.reader import Reader  # torch, which not every start needs

        Reader(start).check_is_of(shape, whole=False, base=base)
    elif recorded is not None:  # other hosts have it: their ranks look too
        _check_recorded(recorded, shape)
    if recorded is None:
        return
    before = read_yaml(recorded, what="recipe")
    for section, key in (*ORDER_OF_SAMPLES, ("dpo", "beta")):
        new = getattr(getattr(recipe, section), key)
        old = before.get(section, {}).get(key, new)  # unchecked: it ran, by the rules of then
        if old != new and key == "tokenizer":
            raise ConfigError(
                f"data.tokenizer was {old} before the checkpoint and is {new} now: its weights know other tokens",
                hint=f"--set data.tokenizer={old} goes on, --resume never begins anew",
            )
        if old != new:
            follows = "another loss follows" if section == "dpo" else "other samples follow"
            warn(f"{section}.{key} was {old} before the checkpoint and is {new} now: {follows} on it")


def _check_recorded(recorded: Path, shape: ModelShape) -> None:
    """Raise ConfigError where the recipe that the run began with is of a model with other parameters."""
    from hetctl.trainer.model.model import shapes_of

    try:
        before = load_recipe(recorded).shape()
    except HetctlError:  # by older rules, or its model's folder is gone
        return
    if shapes_of(before) != shapes_of(shape):
        raise ConfigError(
            f"what the run in {recorded.parent} saved is of another model than {shape.name}: {before.name}",
            hint="give each model a run folder of its own (--run-dir)",
        )
