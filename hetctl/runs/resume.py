"""Where a run goes on from, and what is kept of it for that."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json, write_atomically
from hetctl.comm.contract.values import decode, encode
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agents import Agents
from hetctl.render.run import stalled_sentence
from hetctl.runs.prepare import Prepared
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.recipe import Recipe

RESUME = "resume:"  # before the command that goes on, wherever it is printed
FINISHED = "train further with --set train.steps=N, or take the model: hetctl export"
STALLED = "train further with a larger train.patience (--set), or take the model: hetctl export --step best"
NOT_KEPT = (
    "`hetctl train RECIPE --run-dir` of that folder goes on with what you name; programs go on by their own means"
)


def keep(prepared: Prepared, folder: RunFolder) -> None:
    """Write down what a run was started with, for its owner only: how hosts are entered may hold secrets."""
    write_atomically(folder.prepared, json.dumps(encode(prepared)), private=True)


def kept(folder: RunFolder) -> Prepared:
    """What a run was started with. Raises ConfigError where its folder does not say."""
    try:
        data = read_json(folder.prepared)
    except FileNotFoundError:
        raise ConfigError(f"{folder.path} does not hold what it was started with", hint=NOT_KEPT) from None
    except ValueError as error:
        raise ConfigError(f"{folder.prepared} is damaged: {error}", hint=NOT_KEPT) from None
    return decode(Prepared, data, where=folder.prepared.name)


def shares_cores(folder: RunFolder) -> bool:
    """Whether a run's ranks share cores, of which paces say nothing; False where its folder does not tell."""
    try:
        return kept(folder).shares_cores
    except ConfigError:
        return False


def changes(before: Prepared, recipe: Recipe, cluster: Cluster) -> list[str]:
    """What another recipe and cluster change of a run, a line each: `train.steps: 160 -> 320`."""
    old, new = encode(before.recipe), encode(recipe)
    keys = [(section, key) for section, found in new.items() for key in found]
    lines = [f"{s}.{k}: {old[s][k]} -> {new[s][k]}" for s, k in keys if new[s][k] != old[s][k]]
    if cluster.digest != before.cluster.digest:
        lines.append(f"cluster: {_islands(before.cluster)} -> {_islands(cluster)}")
    return lines


def refuse_finished(folder: RunFolder, recipe: Recipe, *, from_newest: bool = True) -> None:
    """Raise ConfigError where all steps are made, or the newest checkpoint is where the run stalled."""
    summary = folder.read_summary()
    patience = recipe.train.patience
    stalled = from_newest and summary.get("status") == "done"
    if stalled and patience and patience <= (summary.get("stalled") or 0):
        raise ConfigError(f"{folder.name} is finished: {stalled_sentence(summary)}", hint=STALLED)
    if summary.get("status") == "done" and recipe.train.steps <= summary.get("steps", 0):
        raise ConfigError(f"{folder.name} is finished: all of its {summary['steps']} steps are made", hint=FINISHED)


def resume_command(folder: RunFolder, begin: Path | None = None) -> str:
    """What to type to go on with a run, in any folder; `begin` is another run's checkpoint that it began from."""
    words = ["hetctl", "resume", str(folder.path)]
    return shlex.join([*words, *(["--from", str(begin)] if begin else [])])


def find_start(resume: str, agents: Agents) -> Path | None:
    """The checkpoint to continue from: a whole path, or the name that all hosts know it by."""
    if resume == "never":
        return None
    if resume != "auto":
        return Path(resume).resolve()
    if not agents.spread:
        newest = listing.newest(agents.sites[0].folder.checkpoints)
        return Path(newest.name) if newest else None
    newest_name = newest_on([s.checkpoints for s in agents.sites])
    return Path(newest_name) if newest_name else None


def newest_on(hosts: Iterable[Collection[str]]) -> str | None:
    """The newest checkpoint that every host has part of; one without any may get them from the others.

    None where a host that the run began on had not named its first one when another had: no checkpoint is whole then.
    """
    held, begun = [set(names) for names in hosts if names], {listing.name_of(0)}
    if begun in held and all(len(names) == 1 for names in held):
        return None
    common = set.intersection(*held) if held else set()
    if held and not common:
        raise ConfigError(
            "the hosts' newest checkpoints are of different steps, and none is on all of them",
            hint="leave out a host that was away for long, or --resume never",
        )
    return max(common, default=None)


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name says; None where a person named it otherwise."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def _islands(cluster: Cluster) -> str:
    return ", ".join(f"{island.name}:{len(island.members)}" for island in cluster.islands)
