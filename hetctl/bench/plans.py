"""`hetctl bench plans`: predicted beside measured, for the chosen plan and the next best ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hetctl.bench.pipeline import MEASURE_TIMEOUT_S, Program, run_ranks
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.contract.placement import Placement
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import show_seconds
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agent_link import Event
from hetctl.launcher.supervisor.environment import device_type, placement_of
from hetctl.runs.launch import Launch
from hetctl.runs.program import seats_of
from hetctl.trainer.job import Job
from hetctl.trainer.planning.planner import EXECUTABLE, weigh
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.recipe import Recipe

JOBS_VARIABLE, STEPS_VARIABLE = "HETCTL_BENCH_JOBS", "HETCTL_BENCH_STEPS"
PLACEMENTS_VARIABLE = "HETCTL_BENCH_PLACEMENTS"


@dataclass(frozen=True)
class PlanCase:
    """A plan to be run, and what it was made from."""

    plan: Plan
    recipe: Recipe
    name: str
    cluster: Cluster | None = None  # other labels of the same devices; None: the bench's own


def candidates(cluster: Cluster, recipe: Recipe, *, profile: Profile | None, alternatives: int) -> list[PlanCase]:
    """The chosen plan and the next best ones that the planner kept. Raises Infeasible or ConfigError."""
    planning = weigh(cluster, recipe, profile=profile, abilities=EXECUTABLE)
    count = min(alternatives + 1, len(planning.predictions))
    plans = [planning.alternative(cluster, recipe, number) for number in range(count)]
    return [PlanCase(plan, recipe, "chosen" if not n else f"next {n}") for n, plan in enumerate(plans)]


def bench_plans(cluster: Cluster, cases: Sequence[PlanCase], *, steps: int, sink: Sink) -> dict[str, Any]:
    """Every case's step time, predicted and measured, in one launch. Raises WorkFailed."""
    _, seats = seats_of(cluster)
    placements = [_placement(case.cluster or cluster, case.plan) for case in cases]
    rows: list[dict[str, Any]] = []

    def on_event(event: Event) -> None:
        if event["event"] == "plan":
            rows.append(_row(cases[event["number"]], event))
            sink.say(f"{rows[-1]['name']}: {show_seconds(rows[-1]['measured_s'])} a step")

    def files(folder: RunFolder) -> dict[str, str]:
        jobs = [
            encode(Job(c.plan, c.recipe, c.recipe.shape(), str(folder.checkpoints), timeout_s=MEASURE_TIMEOUT_S))
            for c in cases
        ]
        return {
            JOBS_VARIABLE: json.dumps(jobs),
            PLACEMENTS_VARIABLE: json.dumps([p.to_json() for p in placements]),
            PLACEMENT_VARIABLE: placements[0].to_json(),
        }

    kind = device_type(cluster.runs, [i.vendor for i in cluster.islands])
    program = Program("hetctl.trainer.bench.plans", files, kind, {STEPS_VARIABLE: str(steps)})
    run_ranks(program, Launch(cluster, tuple(seats)), on_event, sink=sink)
    if len(rows) != len(cases):
        raise WorkFailed(f"only {len(rows)} of {len(cases)} plans were measured")
    best = min(row["measured_s"] for row in rows)
    return {"plans": rows, "chosen_over_best": rows[0]["measured_s"] / best}


def _placement(cluster: Cluster, plan: Plan) -> Placement:
    places, seats = seats_of(cluster)
    return placement_of(places, plan.bridges, seats, runs=cluster.runs)


def _row(case: PlanCase, event: Event) -> dict[str, Any]:
    predicted, measured = case.plan.predicted, statistics.median(event["seconds"])
    assert predicted is not None
    return {
        "name": case.name,
        "layout": layout(case.plan),
        "basis": predicted.basis,
        "predicted_s": predicted.step_time_s,
        "measured_s": measured,
        "spread_s": [min(event["seconds"]), max(event["seconds"])],
        "error": predicted.step_time_s / measured - 1,
        "predicted_memory_bytes": max(predicted.memory_bytes, default=None),
        "peak_memory_bytes": event["peak_memory_bytes"],
        "slower": event["slower"],
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
