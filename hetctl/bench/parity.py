"""Does training across islands come to what one process comes to? A tiny model in fp64, run both ways and compared.

Of a run of any model its first steps, in the run's own precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hetctl.bench.plans import layout
from hetctl.bench.ranks import run_ranks
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.plan import Plan
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.job import Job
from hetctl.trainer.model.config import find_weights
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.precision import precision_of
from hetctl.trainer.recipe import BridgeSection, ParallelismSection, Recipe, load_recipe, parse_override

Across = Literal["pipeline", "data"]  # what crosses the bridge: activations between stages, or sums of gradients
SEQ_LEN, SAMPLES_PER_RANK = 16, 4
FIRST_STEPS = 5


def compare(cluster: Cluster, across: Across, *, steps: int, sink: Sink, keep: Path | None = None) -> dict[str, Any]:
    """The largest deviation of any step's loss or norm from one process on the cluster's first device.

    Raises Infeasible where no such plan exists, WorkFailed where a run fails.
    """
    ranks = sum(len(i.members) for i in cluster.islands)
    recipe = _recipe(across, islands=len(cluster.islands), samples=SAMPLES_PER_RANK * ranks, steps=steps)
    plan = make_plan(cluster, recipe)
    sink.say(f"across islands: {layout(plan)}")
    spread = _run(cluster, plan, recipe, sink, keep and keep / "islands")
    alone = _one_device(cluster)
    lonely = _recipe(across, islands=1, samples=SAMPLES_PER_RANK * ranks, steps=steps)
    sink.say("one process")
    single = _run(alone, make_plan(alone, lonely), lonely, sink, keep and keep / "one-process")
    off = {key: _worst(spread[key], single[key]) for key in ("losses", "norms")}
    return {
        "layout": layout(plan),
        "steps": steps,
        "worst_deviation": max(off.values()),
        "bridge_bytes": spread["bridge_bytes"],
        "losses": {"islands": spread["losses"], "one_process": single["losses"]},
        "norms": {"islands": spread["norms"], "one_process": single["norms"]},
    }


def first_losses(cluster: Cluster, recipe: Recipe, *, way: str, sink: Sink) -> tuple[float | None, ...]:
    """A run's first losses in one process on the cluster's first device. Raises Infeasible where the model does not
    fit there, WorkFailed where it fails."""
    alone, precision = _one_device(cluster), precision_of(cluster, recipe)
    train = replace(recipe.train, precision=precision, validate_every=0, profile_step=None, adapt=False)
    never = replace(recipe.checkpoint, every=0, last=False)
    recipe = replace(recipe, train=train, checkpoint=never, parallelism=ParallelismSection(), bridge=BridgeSection())
    plan, losses = make_plan(alone, recipe), list[float | None]()
    weights, steps = find_weights(recipe.model.name), min(FIRST_STEPS, train.steps)

    def files(folder: RunFolder) -> dict[str, str]:
        job = Job(plan, recipe, recipe.shape(), str(folder.checkpoints), first_steps=steps)
        return {variables.JOB: replace(job, weights=str(weights) if weights else None).to_json()}

    def on_figures(name: str, values: dict[str, Any]) -> None:
        losses.extend([values["loss"]] if name == "step" else [])

    run_ranks("hetctl.trainer", Launch.of(alone, plan, way=way), on_figures, files=files, sink=sink)
    return tuple(losses)


def _recipe(across: Across, *, islands: int, samples: int, steps: int) -> Recipe:
    stages = {"pipeline": (f"parallelism.pipeline={islands}", "parallelism.order=given")}
    settings = [
        *(f"train.steps={steps}", "train.precision=fp64", "optimizer.clip_norm=0.5", "optimizer.warmup_steps=2"),
        "optimizer.lr=3e-4",  # at 2e-3 AdamW lets rounding grow to 8e-11 in 20 steps: it divides by small gradients
        *stages.get(across, ("parallelism.pipeline=1",)),
    ]
    sizes = [("model.name", "demo"), ("model.seq_len", SEQ_LEN), ("batch.global_batch", samples)]
    return load_recipe(None, [*map(parse_override, settings), *sizes])


def _one_device(cluster: Cluster) -> Cluster:
    """The cluster of which only the first device is left."""
    first = cluster.islands[0]
    return replace(cluster, islands=(replace(first, members=first.members[:1]),), links=())


def _run(cluster: Cluster, plan: Plan, recipe: Recipe, sink: Sink, keep: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"bridge_bytes": 0}

    def on_figures(name: str, values: dict[str, Any]) -> None:
        if name == "result":
            found.update(values)
        elif name == "sent":
            found["bridge_bytes"] += values["bytes"]

    def files(folder: RunFolder) -> dict[str, str]:
        return {variables.JOB: Job(plan, recipe, recipe.shape(), str(folder.checkpoints)).to_json()}

    run_ranks("hetctl.trainer.bench.parity", Launch.of(cluster, plan), on_figures, files=files, sink=sink, keep=keep)
    if "losses" not in found:
        raise WorkFailed("the parity run ended without a result")
    return found


def _worst(found: Sequence[float | None], wanted: Sequence[float | None]) -> float:
    """The largest difference; infinite where a step is missing or not finite."""
    if len(found) != len(wanted) or None in found or None in wanted:
        return math.inf
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None)
