"""`hetctl bench plans`: predicted beside measured, for the chosen plan and the next best ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hetctl.bench.pipeline import MEASURE_TIMEOUT_S
from hetctl.bench.ranks import run_ranks
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import show_seconds
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.job import Job
from hetctl.trainer.planning.planner import weigh
from hetctl.trainer.planning.precision import settled
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.recipe import Recipe


@dataclass(frozen=True)
class PlanCase:
    """A plan to be run, and what it was made from."""

    plan: Plan
    recipe: Recipe
    name: str
    cluster: Cluster | None = None  # other labels of the same devices; None: the bench's own


def candidates(cluster: Cluster, recipe: Recipe, *, profile: Profile | None, alternatives: int) -> list[PlanCase]:
    """The chosen plan and the next best ones that the planner kept. Raises Infeasible or ConfigError."""
    planning = weigh(cluster, recipe, profile=profile)
    count = min(alternatives + 1, len(planning.predictions))
    plans = [planning.alternative(cluster, recipe, number) for number in range(count)]
    recipe = settled(recipe, cluster)
    return [PlanCase(plan, recipe, "chosen" if not n else f"next {n}") for n, plan in enumerate(plans)]


def bench_plans(cluster: Cluster, cases: Sequence[PlanCase], *, steps: int, sink: Sink) -> dict[str, Any]:
    """Every case's step time, predicted and measured, in one launch. Raises WorkFailed."""
    rows: list[dict[str, Any]] = []

    def on_figures(name: str, values: dict[str, Any]) -> None:
        if name == "plan":
            rows.append(_row(cases[values["number"]], values))
            sink.say(f"{rows[-1]['name']}: {show_seconds(rows[-1]['measured_s'])} a step")

    def files(folder: RunFolder) -> dict[str, str]:
        kept, limit = str(folder.checkpoints), MEASURE_TIMEOUT_S
        jobs = [encode(Job(c.plan, c.recipe, c.recipe.shape(), kept, timeout_s=limit)) for c in cases]
        bridged = [Launch.of(c.cluster or cluster, bridges=c.plan.bridges).placement.to_json() for c in cases]
        return {variables.BENCH_JOBS: json.dumps(jobs), variables.BENCH_PLACEMENTS: json.dumps(bridged)}

    launch, settings = Launch.of(cluster, bridges=cases[0].plan.bridges), {variables.BENCH_STEPS: str(steps)}
    run_ranks("hetctl.trainer.bench.plans", launch, on_figures, files=files, settings=settings, sink=sink)
    if len(rows) != len(cases):
        raise WorkFailed(f"only {len(rows)} of {len(cases)} plans were measured")
    best = min(row["measured_s"] for row in rows)
    return {"plans": rows, "chosen_over_best": rows[0]["measured_s"] / best}


def _row(case: PlanCase, found: Mapping[str, Any]) -> dict[str, Any]:
    predicted, measured = case.plan.predicted, statistics.median(found["seconds"])
    assert predicted is not None
    return {
        "name": case.name,
        "layout": layout(case.plan),
        "basis": predicted.basis,
        "predicted_s": predicted.step_time_s,
        "measured_s": measured,
        "spread_s": [min(found["seconds"]), max(found["seconds"])],
        "error": predicted.step_time_s / measured - 1,
        "predicted_memory_bytes": max(predicted.memory_bytes, default=None),
        "peak_memory_bytes": max(filter(None, found["memory_bytes"]), default=None),
        "memory_bytes": list(zip(predicted.memory_bytes, found["memory_bytes"], strict=True)),  # foretold, held
        "spent_s": found["spent_s"],
        "slower": found["slower"],
    }


def layout(plan: Plan) -> str:
    """Replicas as people write them: layers per stage, width, micro-batches."""
    replicas = []
    for replica in plan.replicas:
        stages = []
        for s in replica.stages:
            words = f"{s.layers[1] - s.layers[0]} on {plan.ranks[s.ranks[0]].island} x{len(s.ranks)}"
            extras = (f"tensor {s.tensor_parallel}", s.tensor_parallel > 1), (f"shards {s.shards}", s.shards > 1)
            more = (f"{s.recompute} recompute", s.recompute != "none"), ("offload", s.offload)
            stages.append(" ".join([words, *(word for word, there in (*extras, *more) if there)]))
        first = replica.stages[0]
        replicas.append(f"{' | '.join(stages)}; {first.micro_batches} of {first.micro_batch_size}")
    return " + ".join(replicas)


def table(result: dict[str, Any]) -> Table:
    """One row a plan."""
    shown = Table("plan", "layout", "predicted", "measured (min - max)", "off by")
    for row in result["plans"]:
        low, high = (show_seconds(s) for s in row["spread_s"])
        measured = f"{show_seconds(row['measured_s'])} ({low} - {high})"
        shown.add_row(row["name"], row["layout"], show_seconds(row["predicted_s"]), measured, f"{row['error']:+.1%}")
    return shown
