"""Schedules: every micro-batch once forward and once backward, never more in flight than allowed, never stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.schedule import (
    SCHEDULES,
    Action,
    interleaved_actions,
    most_held,
    split_actions,
    stage_actions,
)


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
    assert " ".join(map(str, split_actions(4, 1, put_off=1))) == "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"
    first, second = (interleaved_actions(2, devices=2, device=d, chunks=2) for d in (0, 1))
    assert " ".join(map(str, first)) == "F0 F1 F0/1 F1/1 B0/1 B1/1 B0 B1"
    assert " ".join(map(str, second)) == "F0 F1 F0/1 B0/1 F1/1 B1/1 B0 B1"
    assert SCHEDULES["1f1b"].in_flight(4, 8) == (4, 3, 2, 1)
    assert SCHEDULES["eager-1f1b"].in_flight(3, 8) == (5, 3, 1)


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["1f1b", "eager-1f1b"]))
def test_a_pipeline_of_these_stages_never_deadlocks(stages: int, micro_batches: int, schedule: str) -> None:
    """Run all stages' lists, an action only when what it needs is done elsewhere."""
    queues = [list(stage_actions(micro_batches, w)) for w in SCHEDULES[schedule].in_flight(stages, micro_batches)]
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


def run_all(lists: list[tuple[Action, ...]], stages_of: list[tuple[int, ...]], stages: int) -> None:
    """Run all devices' lists, an action only when what it needs is done elsewhere."""
    queues = [list(actions) for actions in lists]
    done: set[tuple[int, str, int]] = set()
    while any(queues):
        before = len(done)
        for held, queue in zip(stages_of, queues, strict=True):
            while queue:
                action, stage = queue[0], held[queue[0].chunk]
                needs = {"F": (stage - 1, "F"), "B": (stage + 1, "B"), "W": (stage, "B")}[action.kind]
                if 0 <= needs[0] < stages and (*needs, action.micro_batch) not in done:
                    break
                done.add((stage, action.kind, action.micro_batch))
                queue.pop(0)
        assert len(done) > before, "no device can go on"
    kinds = {kind for _, kind, _ in done}
    assert len(done) == len(kinds) * stages * len({k for _, _, k in done})


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_never_deadlocks_and_holds_what_megatron_holds(devices: int, rounds: int, chunks: int) -> None:
    count, stages = rounds * devices, devices * chunks
    held = [tuple(range(d, stages, devices)) for d in range(devices)]
    lists = [SCHEDULES["interleaved"].actions(count, stages=stages, held=h, forwards_ahead=1) for h in held]
    run_all(lists, held, stages)
    for device, actions in enumerate(lists):
        warm = min(count * chunks, 2 * (devices - device - 1) + (chunks - 1) * devices)
        alive = [sum(1 if a.kind == "F" else -1 for a in actions[: k + 1]) for k in range(len(actions))]
        assert max(alive) == min(count * chunks, warm + 1)
        assert most_held(actions, [1.0] * chunks) == max(alive)


@given(st.integers(2, 6), st.integers(1, 12), st.sampled_from(["1f1b", "eager-1f1b"]))
def test_split_backwards_never_deadlock_and_hold_no_more_than_the_first_stage(
    stages: int, micro_batches: int, ahead: str
) -> None:
    forwards = SCHEDULES[ahead].in_flight(stages, micro_batches)
    lists = [
        SCHEDULES["zero-bubble"].actions(micro_batches, stages=stages, held=(i,), forwards_ahead=forwards[i])
        for i in range(stages)
    ]
    run_all(lists, [(i,) for i in range(stages)], stages)
    for i, actions in enumerate(lists):
        assert most_held(actions, [1.0], [1.0]) == min(micro_batches, forwards[i] + i)
        assert most_held(actions, [1.0], [0.0]) == min(micro_batches, forwards[i])


def test_micro_batches_that_do_not_go_round_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 2"):
        interleaved_actions(3, devices=2, device=0, chunks=2)


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stage_actions(0, 1)
