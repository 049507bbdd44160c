"""Sums of gradients begin while backward still runs, last layers first; switched off, they wait for its end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetctl.comm.group import backend
from hetctl.trainer.data.samples import Samples
from hetctl.trainer.gradients import buckets, layout
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from hetctl.trainer.model.shapes import ModelShape
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

PAIR = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 2), Pipe((Cut((0, 4), (1,)),), 1, 3)))


def order_of_events(rank: int, overlap: bool) -> list[str]:
    """One step: each bucket's sum as it starts, and 'end' when backward is over."""
    layout.BUCKET_ELEMENTS = 1
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


LONG = 1536


class LongSamples:
    """Random tokens, long samples."""

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        tokens = np.random.default_rng((step, first)).integers(0, LARGE.vocab, (past_last - first, LONG + 1))
        return tokens[:, :-1], tokens[:, 1:]


LARGE = ModelShape("large", "llama", layers=4, hidden=96, heads=4, kv_heads=4, intermediate=256, vocab=48)


def bytes_during_backward(rank: int, overlap: bool) -> list[tuple[float, float]]:
    """Per step: (share of its bridged gradient bytes that moved before backward ended, seconds waited after it)."""
    layout.BUCKET_ELEMENTS = 1
    plan = plan_of(PAIR, seq_len=LONG)
    asked = recipe("sgd", clip_norm=0.0, global_batch=5, precision="fp32", overlap=overlap)
    trainer = build(Job(plan, asked, LARGE, ""), torch.device("cpu"), training=LongSamples())
    at: list[int] = []
    finish, synchronise = trainer.pipeline._finish, trainer.gradients.synchronise

    def noted_finish() -> None:
        at.append(backend.bridge_bytes())
        finish()

    def noted_synchronise() -> None:
        synchronise()
        at.append(backend.bridge_bytes())

    trainer.pipeline._finish = noted_finish  # type: ignore[method-assign]
    trainer.gradients.synchronise = noted_synchronise  # type: ignore[method-assign]
    found = []
    for step in range(10):
        dist.barrier()
        at[:] = [backend.bridge_bytes()]
        trainer.train_step(step)
        trainer.timeline.end_step()
        begin, during, after = at
        waited = sum(s.end - s.start for s in trainer.timeline.steps[-1] if s.kind == "sync")
        found.append(((during - begin) / (after - begin), waited))
    trainer.batches.close()
    return found[1:]  # the first step connects


def test_nine_tenths_of_the_gradient_bytes_cross_islands_during_backward() -> None:
    """As the replica that ends last sees it, in the best of nine steps: two cores run all threads of both ranks."""
    _, overlapped = on_islands((1, 1), bytes_during_backward, True)
    _, after = on_islands((1, 1), bytes_during_backward, False)
    assert max(share for share, _ in overlapped) >= 0.9
    assert max(share for share, _ in after) < 0.01
    assert min(waited for _, waited in overlapped) < min(waited for _, waited in after)
