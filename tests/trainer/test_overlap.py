"""Sums of gradients begin while backward still runs, last layers first; switched off, they wait for its end."""

from __future__ import annotations

import pytest
import torch

from hetctl.trainer import buckets
from hetctl.trainer.job import Job
from hetctl.trainer.loop import build
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

PAIR = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 2), Pipe((Cut((0, 4), (1,)),), 1, 3)))


def order_of_events(rank: int, overlap: bool) -> list[str]:
    """One step: each bucket's sum as it starts, and 'end' when backward is over."""
    buckets.BUCKET_ELEMENTS = 1
    events: list[str] = []
    plan = plan_of(PAIR, seq_len=SEQ_LEN)
    asked = recipe("sgd", clip_norm=0.0, global_batch=5, overlap=overlap)
    trainer = build(Job(plan, asked, SHAPE, ""), torch.device("cpu"), training=UnevenSamples(5))
    right = buckets.Bucket.start_sum

    def noted(self: buckets.Bucket) -> None:
        events.append(str(self.layout.key))
        right(self)

    buckets.Bucket.start_sum = noted  # type: ignore[method-assign]
    finish = trainer.pipeline._finish
    trainer.pipeline._finish = lambda: (events.append("end"), finish())[1]  # type: ignore[method-assign,func-returns-value]
    trainer.train_step(0)
    trainer.batches.close()
    return events


@pytest.mark.parametrize("overlap", [True, False])
def test_when_sums_start(overlap: bool) -> None:
    layers = [str(key) for key in range(SHAPE.layers + 2)]  # embedding, blocks, head
    for events in on_islands((1, 1), order_of_events, overlap):
        assert events == ([*reversed(layers), "end"] if overlap else ["end", *layers])
