"""The next batch is made while the current one is used, and what goes wrong in making it is not lost."""

from __future__ import annotations

import threading

import pytest

from hetctl.trainer.data.batches import Prefetch


def test_the_next_batch_is_made_ahead_in_another_thread() -> None:
    made: dict[int, str] = {}
    second = threading.Event()

    def make(step: int) -> int:
        made[step] = threading.current_thread().name
        if step == 1:
            second.set()
        return step * 10

    batches = Prefetch(make, steps=3)
    assert batches.get(0) == 0
    assert second.wait(10), "step 1 is made without being asked for"
    assert made[1] != threading.current_thread().name
    assert batches.get(1) == 10
    assert batches.get(0) == 0, "any step may be asked for"
    batches.close()
    assert 3 not in made, "nothing is made beyond the last step"


def test_an_error_in_the_thread_is_raised_where_the_batch_is_wanted() -> None:
    def make(step: int) -> int:
        if step:
            raise ValueError("no such sample")
        return step

    batches = Prefetch(make, steps=2)
    batches.get(0)
    with pytest.raises(ValueError, match="no such sample"):
        batches.get(1)
    batches.close()
