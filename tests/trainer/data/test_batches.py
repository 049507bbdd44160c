"""The next batch is made while the current one is used, and what goes wrong in making it is not lost."""

from __future__ import annotations

import threading

import pytest
import torch

from hetctl.trainer.data.batches import Batches, Prefetch
from hetctl.trainer.model.dropout import draws_of
from hetctl.trainer.ranks.groups import Place
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, UnevenSamples


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


def test_samples_of_training_alone_have_the_numbers_that_dropout_follows() -> None:
    """Each its own in the whole run, whatever rank and micro-batch it is in."""
    layout = Layout(((0, 1), (2,)), (Pipe((Cut((0, 4), (0, 1)),), 2, 3), Pipe((Cut((0, 4), (2,)),), 1, 2)))
    plan, data, found = plan_of(layout, seq_len=SEQ_LEN), UnevenSamples(8), []
    for rank in range(3):
        batches = Batches(
            plan,
            Place.of(plan, rank),
            torch.device("cpu"),
            training=data,
            validation=data,
            steps=9,
            dropout_seed=5,
        )
        for batch in batches.of_training(3):
            assert batch.draws is not None
            assert batch.draws.shape == batch.inputs.shape[:1]
            found += batch.draws.tolist()
        assert all(batch.draws is None for batch in batches.of_validation(3))
        batches.close()
    assert sorted(found) == sorted(draws_of(torch.arange(24, 32), 5).tolist())
