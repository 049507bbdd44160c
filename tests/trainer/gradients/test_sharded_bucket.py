"""Buckets in shards: few whole gradients at once, state shared out inside stages or over all replicas."""

from __future__ import annotations

import pytest
import torch

from hetctl.trainer.gradients.buckets import _hosted
from hetctl.trainer.gradients.gradients import WHOLE_SCATTERS
from hetctl.trainer.gradients.sharded_bucket import ShardedBucket
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import PLANTS, SEQ_LEN, SHAPE, UnevenSamples, recipe


def wholes_held(rank: int, plant: str) -> tuple[int, int, int]:
    """(the most buckets whose whole gradient was on its way into shards at once, how many were waited for in the call
    that began them, buckets)."""
    PLANTS[plant]()
    layout = Layout(((0, 1),), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 3),))
    made = plan_of(layout, seq_len=SEQ_LEN)
    job = Job(made, recipe("sgd", clip_norm=1.0, global_batch=6, sharded="all"), SHAPE, checkpoints="unused")
    trainer = build(job, torch.device("cpu"), training=UnevenSamples(6))
    buckets, held, soon = trainer.gradients.buckets, [0], [0]
    follow = trainer.gradients._follow

    def counted(bucket: ShardedBucket) -> None:
        follow(bucket)
        soon.append(bucket._scattering is None)
        held.append(sum(b._scattering is not None for b in buckets if isinstance(b, ShardedBucket)))

    trainer.gradients._follow = counted  # type: ignore[method-assign]
    trainer.train_step(0)
    return max(held), sum(soon), len(buckets)


def test_few_whole_gradients_are_held_on_their_way_into_shards() -> None:
    for most, soon, buckets in on_islands((2,), wholes_held, "small buckets"):
        assert 0 < most <= WHOLE_SCATTERS < buckets
        assert soon == 0


def test_one_bucket_scatters_while_the_next_micro_batch_computes() -> None:
    assert on_islands((2,), wholes_held, "") == [(1, 0, 1)] * 2


def state_kept(rank: int, sharded: str) -> tuple[int, int]:
    """Elements of optimiser state that a rank keeps of a model which three ranks of two islands hold, and of it all."""
    layout = Layout(((0, 1), (2,)), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 2), Pipe((Cut((0, 4), (2,)),), 2, 1)))
    made = plan_of(layout, seq_len=SEQ_LEN)
    job = Job(made, recipe("adamw", clip_norm=1.0, global_batch=6, sharded=sharded), SHAPE, checkpoints="unused")
    trainer = build(job, torch.device("cpu"), training=UnevenSamples(6))
    trainer.train_step(0)
    kept = sum(state["exp_avg"].numel() for state in trainer.optimizer.state.values())
    return kept, sum(p.numel() for p in trainer.gradients.parameters.values())


def weights_awaited(rank: int) -> list[bool]:
    """Of each wait for weights in the second step, whether they come over the bridge."""
    layout = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 2), Pipe((Cut((0, 4), (1,)),), 1, 2)))
    asked = recipe("adamw", clip_norm=1.0, global_batch=4, sharded="replicas")
    job = Job(plan_of(layout, seq_len=SEQ_LEN), asked, SHAPE, checkpoints="unused")
    trainer = build(job, torch.device("cpu"), training=UnevenSamples(4))
    for step in range(2):
        trainer.train_step(step)
        trainer.timeline.end_step()
    return [span.bridged for span in trainer.timeline.steps[-1] if span.kind == "weights"]


def test_weights_that_come_over_the_bridge_are_waited_for_aloud() -> None:
    for found in on_islands((1, 1), weights_awaited):
        assert found
        assert all(found)


def test_optimiser_state_is_shared_out_inside_stages_or_over_all_replicas() -> None:
    inside, over = on_islands((2, 1), state_kept, "auto"), on_islands((2, 1), state_kept, "replicas")
    padding = 0.2  # of so small a model
    assert [kept / every for kept, every in inside] == pytest.approx([1 / 2, 1 / 2, 1], rel=padding)
    assert [kept / every for kept, every in over] == pytest.approx([1 / 3] * 3, rel=padding)


def test_what_an_offloaded_optimiser_keeps_is_on_the_host_whatever_the_default_device() -> None:
    """Benches build models with their device as the default one."""
    with torch.device("meta"):
        assert _hosted(torch.ones(3), torch.float32).device.type == "cpu"
