"""A simulated step as a Chrome trace, for Perfetto or chrome://tracing: a process per replica, a thread per stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetctl.comm.contract.plan import Plan
from hetctl.render.plan import show_ranks
from hetctl.render.timeline import KINDS
from hetctl.trainer.planning.simulate import SimulatedSpan

MICROSECONDS = 1e6


def chrome_trace(plan: Plan, spans: Sequence[SimulatedSpan], *, clones: int = 1) -> dict[str, Any]:
    """The JSON object format of the Trace Event specification; times in microseconds.

    A simulated replica stands for `clones` equal ones of the plan; transfers have threads of their own.
    """
    events: list[dict[str, Any]] = []
    for number in range(0, len(plan.replicas), clones):
        events.append(_meta("process_name", number // clones, None, f"replica {number}"))
        for index, stage in enumerate(plan.replicas[number].stages):
            island = plan.ranks[stage.ranks[0]].island
            where = f"stage {index}: {island}, ranks {show_ranks(stage.ranks)}"
            events.append(_meta("thread_name", number // clones, 2 * index, where))
            events.append(_meta("thread_name", number // clones, 2 * index + 1, f"stage {index}: transfers"))
    events += [_event(span) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": plan.model, "source": "simulated"}}


def _event(span: SimulatedSpan) -> dict[str, Any]:
    label = span.kind if span.micro_batch is None else f"{span.kind}{span.micro_batch}"
    about: dict[str, Any] = {"kind": KINDS[span.kind][0]}
    if span.micro_batch is not None:
        about["micro_batch"] = span.micro_batch
    if span.peer is not None:
        about["to_stage"] = span.peer
    return {
        "name": label,
        "cat": KINDS[span.kind][0],
        "ph": "X",
        "ts": round(span.start_s * MICROSECONDS, 3),
        "dur": round((span.end_s - span.start_s) * MICROSECONDS, 3),
        "pid": span.replica,
        "tid": 2 * span.stage + (span.kind == "send"),
        "args": about,
    }


def _meta(name: str, process: int, thread: int | None, label: str) -> dict[str, Any]:
    event: dict[str, Any] = {"name": name, "ph": "M", "pid": process, "args": {"name": label}}
    return event if thread is None else {**event, "tid": thread}
