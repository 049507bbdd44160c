"""Held-out samples in the middle of a run: the loss of the weights as they are, and training that does not notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

STAGES = Layout(((0,), (1,)), (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 4),))
REPLICAS = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 2, 3), Pipe((Cut((0, 4), (1,)),), 2, 1)))
SPLIT = replace(STAGES, schedule="zero-bubble")
STEPS = 4


def trained(rank: int, layout: Layout, sharded: str, every: int) -> tuple[list[float], list[float]]:
    """(losses of training, of validation after every so many steps)."""
    plan = plan_of(layout, seq_len=SEQ_LEN)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, validation_samples=8, sharded=sharded)
    data = UnevenSamples(8)
    trainer = build(Job(plan, asked, SHAPE, "unused"), torch.device("cpu"), training=data, validation=data)
    losses, held_out = [], []
    for step in range(STEPS):
        losses.append(trainer.train_step(step).loss)
        trainer.timeline.end_step()
        if every and (step + 1) % every == 0:
            found = trainer.validate()
            assert found is not None
            held_out.append(found)
    trainer.gradients.arrive()
    trainer.batches.close()
    return losses, held_out


@pytest.mark.parametrize(
    ("layout", "sharded"), [(STAGES, "auto"), (SPLIT, "auto"), (REPLICAS, "replicas"), (REPLICAS, "all")]
)
def test_training_goes_on_as_if_nobody_had_looked(layout: Layout, sharded: str) -> None:
    quiet = on_islands((1, 1), trained, layout, sharded, 0)
    looked_at = on_islands((1, 1), trained, layout, sharded, 1)
    assert [losses for losses, _ in looked_at] == [losses for losses, _ in quiet]
    (held_out, again) = (found for _, found in looked_at)
    assert held_out == again
    assert len(set(held_out)) == STEPS  # of other weights each time
