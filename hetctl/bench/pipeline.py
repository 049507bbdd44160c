"""`hetctl bench pipeline`: plan one stage per island, start the ranks, collect what they measured."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hetctl.bench.ranks import run_ranks
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.job import Job
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.precision import settled
from hetctl.trainer.recipe import Recipe

MEASURE_TIMEOUT_S = 600.0
SETTINGS = ("batch.micro_batch_size=1", "parallelism.order=given")  # of the recipe


def bench_pipeline(
    cluster: Cluster, recipe: Recipe, *, rounds: int, sink: Sink, keep: Path | None = None
) -> dict[str, Any]:
    """Tokens/s of one pipeline over native groups, the bridge and naive copies, in turn. Raises WorkFailed.

    `recipe.batch.global_batch` are the micro-batches of a step, of one sample each.
    """
    recipe = replace(recipe, parallelism=replace(recipe.parallelism, pipeline=len(cluster.islands)))
    plan, recipe = make_plan(cluster, recipe), settled(recipe, cluster)
    layers = [f"{s.layers[1] - s.layers[0]} on {plan.ranks[s.ranks[0]].island}" for s in plan.replicas[0].stages]
    about = f"{recipe.batch.global_batch} micro-batches of {plan.seq_len} tokens"
    sink.say(f"{recipe.model.name}: layers {', '.join(layers)}; {about}")
    found: dict[str, Any] = {}

    def on_figures(name: str, values: dict[str, Any]) -> None:
        if name == "round":
            sink.say(f"round {values['round']} of {values['rounds']}{' (warm-up)' if not values['round'] else ''}")
        elif name == "result":
            found.update(values)

    def files(folder: RunFolder) -> dict[str, str]:
        job = Job(plan, recipe, recipe.shape(), str(folder.checkpoints), timeout_s=MEASURE_TIMEOUT_S)
        return {variables.JOB: job.to_json()}

    settings = {variables.BENCH_ROUNDS: str(rounds)}
    if speak_alike(cluster):
        settings[variables.BENCH_NATIVE] = "1"
    else:
        sink.say("no native library spans these islands: the bridge itself is the yardstick")
    module, launch = "hetctl.trainer.bench.pipeline", Launch.of(cluster, plan)
    run_ranks(module, launch, on_figures, files=files, settings=settings, sink=sink, keep=keep)
    if not found:
        raise WorkFailed("the measurement ended without a result")
    transports = sorted({b.transport for b in plan.bridges})
    return {"model": recipe.model.name, "seq_len": plan.seq_len, "layers": layers, "transports": transports, **found}


def speak_alike(cluster: Cluster) -> bool:
    """Whether one native library serves all islands: they are emulated on devices of their own, or of one vendor."""
    if cluster.runs is not None:
        return not cluster.shares_devices
    return len({i.vendor for i in cluster.islands}) == 1


def pipeline_table(result: dict[str, Any]) -> Table:
    """Median, spread and ratio to the best native schedule, one row a variant."""
    table = Table("variant", "tokens/s (median)", "min - max", "of the best native (median, min - max)")
    for name, rates in result["tokens_per_s"].items():
        ratios = result["ratios"].get(name)
        shown = "the yardstick"
        if ratios:
            shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
        middle = f"{statistics.median(rates):,.0f}"
        table.add_row(name, middle, f"{min(rates):,.0f} - {max(rates):,.0f}", shown)
    return table
