"""Sums of gradients begin while backward still runs, last layers first; switched off, they wait for its end."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.group import backend
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


LARGE = ModelShape("large", "llama", layers=4, hidden=96, heads=4, kv_heads=4, intermediate=256, vocab=48)
SECONDS = 60.0  # the longest wait for another thread of a busy machine


def one_at_a_time(buckets_begun: list[buckets.Bucket]) -> None:
    """Computing that takes as long as the sum begun before: how fast this machine does either is not judged."""
    right = buckets.Bucket.start_sum

    def held(self: buckets.Bucket) -> None:
        end = time.monotonic() + SECONDS
        while buckets_begun and not is_summed(buckets_begun[-1]) and time.monotonic() < end:
            time.sleep(0.0005)
        right(self)
        buckets_begun.append(self)

    buckets.Bucket.start_sum = held  # type: ignore[method-assign]


def is_summed(bucket: buckets.Bucket) -> bool:
    return bucket.summing is not None and bucket.summing.is_completed()


def bytes_during_backward(rank: int, overlap: bool) -> list[tuple[float, int]]:
    """Per step: (share of its bridged gradient bytes that moved before backward ended, sums that were not over then).

    The rank that ends last judges.
    """
    layout.BUCKET_ELEMENTS = 1
    plan = plan_of(PAIR, seq_len=SEQ_LEN)
    asked = recipe("sgd", clip_norm=0.0, global_batch=5, precision="fp32", overlap=overlap)
    trainer = build(Job(plan, asked, LARGE, ""), torch.device("cpu"), training=UnevenSamples(5))
    at: list[int] = []
    left: list[int] = []
    begun: list[buckets.Bucket] = []
    finish, synchronise = trainer.pipeline._finish, trainer.gradients.synchronise
    if rank == 1 and overlap:
        one_at_a_time(begun)

    def noted_finish() -> None:
        at.append(backend.bridge_bytes())
        left.append(sum(not is_summed(bucket) for bucket in trainer.gradients.buckets))
        finish()

    def noted_synchronise() -> None:
        synchronise()
        at.append(backend.bridge_bytes())

    trainer.pipeline._finish = noted_finish  # type: ignore[method-assign]
    trainer.gradients.synchronise = noted_synchronise  # type: ignore[method-assign]
    found = []
    for step in range(10):
        dist.barrier()
        at[:], begun[:], left[:] = [backend.bridge_bytes()], [], []
        trainer.train_step(step)
        begin, during, after = at
        found.append(((during - begin) / (after - begin), left[0]))
    trainer.batches.close()
    return found


def test_nine_tenths_of_the_gradient_bytes_cross_islands_during_backward() -> None:
    """And only the last sum is waited for after it; without overlap all are."""
    _, overlapped = on_islands((1, 1), bytes_during_backward, True)
    _, after = on_islands((1, 1), bytes_during_backward, False)
    assert min(share for share, _ in overlapped) >= 0.9
    assert max(share for share, _ in after) < 0.01
    assert max(left for _, left in overlapped) <= 1
    assert {left for _, left in after} == {LARGE.layers + 2}  # embedding, blocks, head
