"""The weights of a unit (embedding, block, head) are whole when it computes: awaited, prefetched, released."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import has_cuda_runtime
from hetctl.trainer.gradients.buckets import Bucket
from hetctl.trainer.gradients.sharded_bucket import ShardedBucket
from hetctl.trainer.ranks.timeline import WEIGHTS, Timeline

# Of a model, each some 50 to 150 launches. While the device's queue is full every call of the process waits for a
# kernel's time, on other streams too: behind 500 launches copies of 1 MiB began a third as often as behind 200, behind
# 900 a sixth (docs/benchmarks/303)
UNITS_AHEAD = 2


class UnitWeights:
    """Called before every unit, forward and backward; units: 0 embedding, i + 1 block i, layers + 1 norm and head."""

    def __init__(self, buckets: Sequence[Bucket], plan: Plan, rank: int, *, timeline: Timeline) -> None:
        self.rank, self.timeline, layers = rank, timeline, plan.layer_count
        self.tied = [b for b in buckets if b.layout.key == layers + 2]
        self._ends = (0, layers + 1)  # both use what is tied
        self._of_unit: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            for unit in bucket.layout.units:
                self._of_unit.setdefault(unit, []).append(bucket)
        self._bridged = {bucket: plan.crosses_islands(bucket.shards.ranks) for bucket in buckets}
        self._in_use: list[Bucket] = []
        launches = any(has_cuda_runtime(bucket.weights.device) for bucket in buckets)
        self._launch_limit = LaunchLimit() if launches and plan.crosses_islands(range(plan.world_size)) else None

    def before_unit(self, unit: int) -> None:
        """The model is about to compute this unit forward: its weights must be there, the next ones may follow."""
        self._use(unit, unit + 1)

    def before_backward(self, unit: int) -> None:
        """The same backward."""
        self._use(unit, unit - 1)

    def _use(self, unit: int, following: int) -> None:
        if self._launch_limit is not None:
            self._launch_limit()
        due = self._buckets_of(unit)
        for bucket in self._in_use:
            if bucket not in due:
                bucket.release()
        self._in_use = due
        for bucket in due:
            self._await_weights(bucket)
        for bucket in self._buckets_of(following):
            if bucket not in due:
                bucket.prefetch()

    def _await_weights(self, bucket: Bucket) -> None:
        """Weights that still come from the last update are waited for aloud; sharded ones come for every use."""
        if bucket.arriving is None or isinstance(bucket, ShardedBucket):
            bucket.arrive()
            return
        others = tuple(r for r in bucket.shards.ranks if r != self.rank)
        with self.timeline.span(WEIGHTS, micro_batch=bucket.layout.key, peers=others, bridged=self._bridged[bucket]):
            bucket.arrive()

    def _buckets_of(self, unit: int) -> list[Bucket]:
        return self._of_unit.get(unit, []) + (self.tied if unit in self._ends else [])


class LaunchLimit:
    """Called before each unit of work: waits until the device has begun the one so many before it.

    Weight gradients that a schedule puts off (`split_backward.py`) are no units: they are launched without it.
    """

    def __init__(self) -> None:
        self._begun: deque[Any] = deque()

    def __call__(self) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._begun.append(event)
        if len(self._begun) > UNITS_AHEAD:
            self._begun.popleft().synchronize()
