"""Pages to look at: of a plan, and of runs that ended well, failed, or are under way, without running any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.plan import Plan, save_plan
from hetctl.comm.contract.values import encode
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.plan_page import plan_page
from hetctl.render.report import describe_islands, report_page
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.recipe import load_recipe

SHARES = {"compute": 0.6, "bubble": 0.25, "bridge": 0.1, "native": 0.03, "update": 0.02}
TRACEBACK = 'Traceback (most recent call last):\n  File "loop.py", line 7, in step\nOSError: <disk> is full'
FAILURE: dict[str, Any] = {
    "rank": 1,
    "host": "mi325x-0",
    "reason": "OSError: <disk> is full",
    "traceback": TRACEBACK,
    "victims": [0, 2],
    "hint": "free some of it",
    "log": "/runs/a run/logs/rank-1.log",
    "waiting": {"0": [{"operation": "recv", "peer": 1, "group": "pipeline"}], "2": [{"operation": "all_reduce"}]},
}


def planning(
    spec: str = "h200:1,mi325x:2", *, samples: int = 16, seq_len: int = 1024, model: str = "llama-1b"
) -> Planning:
    sets = [("model.name", model), ("model.seq_len", seq_len), ("batch.global_batch", samples)]
    return weigh(describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, sets))


def plan_html(made: Planning) -> str:
    return plan_page(made.plan, PredictedStep.of(made), explanation=("a <b>doubt</b>",))


def run_folder(path: Path, made: Planning, *, steps: int = 40, failure: dict[str, Any] | None = None) -> RunFolder:
    """A run's folder as `train` leaves it."""
    folder = RunFolder(path)
    (path / "launch").mkdir(parents=True)
    save_plan(folder.plan, made.plan)
    folder.predicted.write_text(json.dumps(encode(PredictedStep.of(made))))
    for step in range(1, steps + 1):
        loss = None if step == 7 else 6.0 - step / 20
        folder.append_metrics({"step": step, "loss": loss, "tokens": 16384, "tokens_per_s": 9000.0 + step % 5})
    if failure:
        folder.failure.write_text(json.dumps(failure))
    return folder


def summary_of(folder: RunFolder, plan: Plan, status: str = "done", **more: Any) -> dict[str, Any]:
    """What a run's summary.json says; of one that failed no more than is known then."""
    known: dict[str, Any] = {
        "status": status,
        "model": plan.model,
        "parameters": 1_235_814_400,
        "steps_planned": 40,
        **folder.progress(),
        "islands": describe_islands(plan),
        "emulated": False,
        "wall_s": 81.0,
        "run_dir": str(folder.path),
    }
    if status == "done":
        known |= {"tokens_per_s": 9000.0, "mfu": 0.31, "efficiency": 0.9, "efficiency_basis": "table"}
        known |= {"bridge_share": 0.1, "bubble_share": 0.25, "shares": SHARES, "bridge_bytes": 1 << 30}
        known |= {"islands": describe_islands(plan, {i.name: SHARES for i in plan.islands})}
        known |= {"timeline": [_spans(r.rank) for r in plan.ranks], "memory_bytes": [30 << 30] * plan.world_size}
        known |= {"validations": [{"step": 20, "validation_loss": 5.1}], "validation_loss": 4.2}
        known |= {"stragglers": [{"rank": 2, "host": plan.ranks[2].host, "ratio": 1.4}]}
    return known | more


def run_html(folder: RunFolder, plan: Plan, status: str = "done", **more: Any) -> str:
    return report_page(folder, summary_of(folder, plan, status, **more))


def _spans(rank: int) -> list[dict[str, Any]]:
    """A forward, a wait and a backward, seconds of a monotonic clock."""
    at = 5000.0 + rank / 100
    kinds = (("F", 0.1), ("wait-B", 0.05), ("B", 0.2), ("update", 0.03))
    spans = []
    for kind, seconds in kinds:
        spans.append({"kind": kind, "start": at, "end": at + seconds, "micro_batch": -1 if kind == "update" else 0})
        at += seconds
    return spans
