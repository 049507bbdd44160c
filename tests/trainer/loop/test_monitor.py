"""Counts that follow speeds in the middle of a run: all ranks change together, and training stays what it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetctl.comm.contract.events import Event, Note
from hetctl.trainer.job import Job
from hetctl.trainer.loop import figures, monitor
from hetctl.trainer.loop.build import build
from hetctl.trainer.ranks.timeline import Span
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, STEPS, Trace, UnevenSamples, difference, recipe, reference, traced_step

EQUAL = Layout(
    ((0,), (1, 2)),
    (Pipe((Cut((0, 4), (0,)),), 1, 4), Pipe((Cut((0, 2), (1,)), Cut((2, 4), (2,))), 1, 4)),
)
PACES = {0: 3.0, 1: 1.0, 2: 1.0}


class Notes:
    """Stands for the reporter: keeps what would be reported."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def emit(self, event: Event) -> None:
        self.said += [event.sentence] if isinstance(event, Note) else []


def watched(rank: int, asked: Any) -> tuple[Trace, list[str], dict[str, Any], float | None]:
    """A whole run that looks after the fourth step, with the paces of PACES."""
    real = monitor.pace_of
    monitor.FIRST_CHECKS = (4,)
    monitor.pace_of = lambda *_: PACES[rank]
    plan = plan_of(EQUAL, seq_len=SEQ_LEN)
    trainer = build(Job(plan, asked, SHAPE, ""), torch.device("cpu"), training=UnevenSamples(8))
    notes = Notes()
    watcher = monitor.SpeedMonitor(trainer, notes, adapt=True)  # type: ignore[arg-type]
    trace = Trace([], [], [])
    for step in range(STEPS):
        traced_step(trainer, step, trace)
        watcher.after(step + 1)
    trainer.batches.close()
    return trace, notes.said, watcher.findings, real(trainer, 5)


def test_counts_follow_speeds_and_nothing_else_changes() -> None:
    asked = recipe("adamw", clip_norm=0.5, global_batch=8)
    found = on_islands((1, 2), watched, asked)
    assert difference([trace for trace, *_ in found], reference(asked)) < 1e-10
    for _, said, findings, pace in found:
        assert findings["adapted"] == [{"step": 4, "before": [4, 4], "after": [2, 6]}]
        assert said == ["counts follow speeds from step 5 on: [4, 4] -> [2, 6]"]
        assert pace is not None
        assert pace > 0


def test_what_islands_do_is_a_mean_of_their_ranks_and_their_largest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cpu = plan_of(EQUAL, seq_len=SEQ_LEN), torch.device("cpu")
    with torch.device("meta"):  # benches build trainers where parameters are made on the device
        islands = [figures.IslandFigures(plan, rank, cpu) for rank in range(3)]
    assert islands[0].report() == {}
    parts = []
    for rank in range(3):
        monkeypatch.setattr(figures, "peak_memory", lambda _, rank=rank: 100 * (rank + 1))
        computing = [Span("F", 0.0, 1.0 + rank), Span("wait-B", 1.0 + rank, 5.0, bridged=True)]
        parts.append(islands[rank].addend(computing if rank < 2 else None).clone())
    islands[0].sums = sum(parts).tolist()  # type: ignore[union-attr]
    found = islands[0].report()["islands"]
    assert list(found) == ["i0", "i1"]
    waits = {"update_s": 0.0, "other_wait_s": 0.0}
    assert found["i0"] == {"step_s": 5.0, "compute_s": 1.0, "bridge_wait_s": 4.0, **waits, "memory_bytes": 100}
    # the last rank knows no step yet: the mean is the other's, the memory is its own
    assert found["i1"] == {"step_s": 5.0, "compute_s": 2.0, "bridge_wait_s": 3.0, **waits, "memory_bytes": 300}
    assert islands[0].report() == {}, "told again within a moment"
    monkeypatch.setattr(figures, "REPORT_S", 0.0)
    assert islands[0].report()["islands"] == found


def test_a_pace_is_computing_without_the_wait_for_weights() -> None:
    step = [Span("F", 0.0, 4.0, 0), Span("weights", 0.0, 3.0, 7), Span("B", 4.0, 6.0, 0)]
    step += [Span("F", 6.0, 7.0, 1), Span("wait-B", 7.0, 8.0, 1), Span("B", 8.0, 10.0, 1)]
    trainer: Any = SimpleNamespace(timeline=SimpleNamespace(steps=[[], step]))
    assert monitor.pace_of(trainer, 5) == 3.0
    assert monitor.pace_of(trainer, 0) is None
