"""Schedules: every micro-batch once forward and once backward, never more in flight than allowed, never stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.schedule import in_flight, stage_actions


@given(st.integers(1, 40), st.integers(1, 12))
def test_each_micro_batch_goes_forward_then_backward(micro_batches: int, ahead: int) -> None:
    actions = stage_actions(micro_batches, ahead)
    assert sorted(str(a) for a in actions) == sorted(f"{k}{m}" for k in "FB" for m in range(micro_batches))
    alive: set[int] = set()
    for action in actions:
        if action.kind == "F":
            alive.add(action.micro_batch)
        else:
            alive.remove(action.micro_batch)  # KeyError: backward before forward
        assert len(alive) <= ahead


def test_published_orders() -> None:
    assert " ".join(map(str, stage_actions(4, 2))) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_flight(4) == (4, 3, 2, 1)
    assert in_flight(3, schedule="eager-1f1b") == (5, 3, 1)


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["1f1b", "eager-1f1b"]))
def test_a_pipeline_of_these_stages_never_deadlocks(stages: int, micro_batches: int, schedule: str) -> None:
    """Run all stages' lists, an action only when what it needs is done elsewhere."""
    queues = [list(stage_actions(micro_batches, w)) for w in in_flight(stages, schedule=schedule)]
    done: set[tuple[int, str, int]] = set()
    while any(queues):
        before = len(done)
        for stage, queue in enumerate(queues):
            if queue:
                kind, k = queue[0].kind, queue[0].micro_batch
                neighbour = stage - 1 if kind == "F" else stage + 1
                if not 0 <= neighbour < stages or (neighbour, kind, k) in done:
                    done.add((stage, kind, k))
                    queue.pop(0)
        assert len(done) > before, "no stage can go on"


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stage_actions(0, 1)
