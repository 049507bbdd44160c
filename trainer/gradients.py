"""Gradients as sums: accumulated per bucket in full precision, summed over all holders once per step.

The gradient of a step is the sum over all samples' token losses divided by all valid tokens, never a mean of means.
A bucket's sum starts as soon as its last micro-batch's backward has passed it, while backward goes on below.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hetctl.comm.plan import Plan
from hetctl.trainer.buckets import Bucket, Interval, Shards, Slot, install, layouts_of
from hetctl.trainer.gathering import ShardedBucket
from hetctl.trainer.groups import ProcessGroups
from hetctl.trainer.model import StageModel
from hetctl.trainer.pipeline import Place
from hetctl.trainer.timeline import Timeline


class Gradients:
    """All buckets of a rank, from the first backward of a step to the weights of the next."""

    def __init__(
        self,
        model: StageModel,
        plan: Plan,
        place: Place,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        overlap: bool = True,
        whole: bool = True,
    ) -> None:
        self.rank, self.overlap = place.rank, overlap
        shards = shards_of(plan, place, groups)
        kind = Bucket if whole or shards.count == 1 else ShardedBucket
        self.buckets = [
            kind(
                layout,
                shards,
                dtype=dtype,
                device=device,
                group=groups.reduce_group(layout.holders) if len(layout.holders) > 1 else None,
                bridged=plan.crosses_islands(layout.holders),
                offload=plan.replicas[place.replica].stages[place.stage].offload,
            )
            for layout in layouts_of(model, plan, replica=place.replica, stage=place.stage, rank=place.rank)
        ]
        self._of_unit = {unit: bucket for bucket in self.buckets for unit in bucket.layout.units}
        self._ends = (0, model.shape.layers + 1)
        self._tied = [b for b in self.buckets if b.layout.key == model.shape.layers + 2]
        self.parameters = install(model, self.buckets)
        self._in_use: list[Bucket] = []
        model.before_unit, model.before_backward = self.before_unit, self.before_backward
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                parameter = self.parameters[slot.name]
                parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulate, bucket, slot))
            bucket.release()

    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter of this stage, whole, in every precision it is kept in."""
        for bucket in self.buckets:
            if any(slot.name == name for slot in bucket.layout.slots):
                bucket.assign(name, value)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step's gradients, and expect those of so many micro-batches."""
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def synchronise(self, timeline: Timeline) -> None:
        """Wait until every bucket is summed over its holders; start the sums that backward has not started."""
        for bucket in self.buckets:
            if bucket.summing is None:
                bucket.start_sum()
        for bucket in self.buckets:
            if bucket.group is not None:
                others = tuple(r for r in bucket.layout.holders if r != self.rank)
                with timeline.span("sync", micro_batch=bucket.layout.key, peers=others, bridged=bucket.bridged):
                    bucket.finish_sum()

    def squared_norm(self) -> Tensor:
        """Sum of squares of the shards that count on this rank, fp64: over all ranks, each element once."""
        total = self.buckets[0].gradient_shard.new_zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            if bucket.counts:
                total += torch.linalg.vector_norm(bucket.gradient_shard).double().square()
        return total

    def scale_(self, factor: float) -> None:
        """Multiply the gradients that this rank's update reads by `factor`."""
        for bucket in self.buckets:
            bucket.gradient_shard.mul_(factor)

    def prepare_update(self) -> None:
        """Hand the optimiser the gradients where its state is on the host."""
        for bucket in self.buckets:
            bucket.prepare_update()

    def publish(self) -> None:
        """Give the model the updated masters; what other ranks hold arrives while the next step begins."""
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.publish()

    def arrive(self) -> None:
        """Wait for all weights, whole."""
        for bucket in self.buckets:
            bucket.arrive()

    def before_unit(self, unit: int) -> None:
        """The model is about to compute this unit forward: its weights must be there, the next ones may follow."""
        self._use(unit, unit + 1)

    def before_backward(self, unit: int) -> None:
        """The same backward."""
        self._use(unit, unit - 1)

    def _use(self, unit: int, following: int) -> None:
        due = self._buckets_of(unit)
        for bucket in self._in_use:
            if bucket not in due:
                bucket.release()
        self._in_use = due
        for bucket in due:
            bucket.arrive()
        for bucket in self._buckets_of(following):
            if bucket not in due:
                bucket.prefetch()

    def _buckets_of(self, unit: int) -> list[Bucket]:
        found = [self._of_unit[unit]] if unit in self._of_unit else []
        return found + (self._tied if unit in self._ends else [])

    def shards(self) -> Iterable[tuple[Bucket, Slot, Interval]]:
        """(bucket, slot, elements) of every part of a parameter that this rank keeps."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                if part := bucket.part_of(slot):
                    yield bucket, slot, part

    def _accumulate(self, bucket: Bucket, slot: Slot, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        bucket.add(slot, parameter.grad)
        parameter.grad = None
        if bucket.missing == 0 and self.overlap:
            bucket.start_sum()


def shards_of(plan: Plan, place: Place, groups: ProcessGroups) -> Shards:
    """With whom a rank shares the state of its stage: runs of `shards` neighbours in the stage's order."""
    stage = plan.replicas[place.replica].stages[place.stage]
    first = place.part // stage.shards * stage.shards
    ranks = stage.ranks[first : first + stage.shards]
    return Shards(place.part - first, ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None)
