"""Where a run goes on from, and what its hosts must be able to read for it."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.supervisor.agents import Agents
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.recipe import Recipe


def paths_to_read(recipe: Recipe, resume: str) -> list[str]:
    """What every host must be able to read: data, tokenizer, a checkpoint that was named."""
    data = recipe.data
    paths = [] if data.source == "python-stdlib" else [str(Path(data.source).resolve())]
    paths += [] if data.tokenizer == "bytes" else [str(Path(data.tokenizer).resolve())]
    return paths + ([] if resume in ("auto", "never") else [str(Path(resume).resolve())])


def find_start(resume: str, agents: Agents) -> Path | None:
    """The checkpoint to continue from: a whole path, or the name that all hosts know it by."""
    if resume == "never":
        return None
    if resume != "auto":
        return Path(resume).resolve()
    if not agents.spread:
        newest = listing.newest(agents.sites[0].folder.checkpoints)
        return Path(newest.name) if newest else None
    held = [set(s.checkpoints) for s in agents.sites if s.checkpoints]  # one without any may get them from the others
    common = set.intersection(*held) if held else set()
    if held and not common:
        raise ConfigError(
            "the hosts' newest checkpoints are of different steps, and none is on all of them",
            hint="leave out a host that was away for long, or --resume never",
        )
    return Path(max(common)) if common else None
