"""Gradients as sums: accumulated per bucket in full precision, summed over all holders once per step.

The gradient of a step is the sum over all samples' token losses divided by all valid tokens, never a mean of means.
A bucket's sum starts as soon as its last micro-batch's backward has passed it, while backward goes on below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetctl.comm.contract.plan import Plan
from hetctl.trainer.gradients.buckets import Bucket, BucketLayout, Interval, Shards, Slot, install, layouts_of
from hetctl.trainer.gradients.launch_limit import LaunchLimit
from hetctl.trainer.gradients.sharded_bucket import ShardedBucket
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare
from hetctl.trainer.ranks.groups import ProcessGroups
from hetctl.trainer.ranks.place import Place
from hetctl.trainer.ranks.timeline import WEIGHTS, Timeline

WHOLE_SCATTERS = 2  # micro-batch gradients of sharded buckets on their way into shards: each is a bucket's, whole
WHOLE_SUMS = 2  # sums of sharded buckets under way at once: each holds a bucket's whole gradient in full precision


class Gradients:
    """All buckets of a rank, from the first backward of a step to the weights of the next."""

    def __init__(
        self,
        models: Sequence[StageModel],
        plan: Plan,
        place: Place,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        overlap: bool = True,
        whole: bool = True,
        over_replicas: bool = False,
        timeline: Timeline,
    ) -> None:
        model = models[0]
        self.rank, self.overlap, self.tensor, self.timeline = place.rank, overlap, model.tensor, timeline
        in_stage = shards_of(plan, place, groups)
        kind = Bucket if whole or in_stage.count == 1 else ShardedBucket
        self.buckets = [
            kind(
                layout,
                shards_over(layout, place.rank, groups) if over_replicas and may_share(plan, layout) else in_stage,
                dtype=dtype,
                device=device,
                group=groups.reduce_group(layout.holders) if len(layout.holders) > 1 else None,
                bridged=plan.crosses_islands(layout.holders),
                offload=plan.replicas[place.replica].stages[place.stage].offload,
            )
            for layout in layouts_of(models, plan, rank=place.rank)
        ]
        self._far = {bucket: plan.crosses_islands(bucket.shards.ranks) for bucket in self.buckets}
        self._of_unit = {unit: bucket for bucket in self.buckets for unit in bucket.layout.units}
        self._ends = (0, model.shape.layers + 1)
        self._tied = [b for b in self.buckets if b.layout.key == model.shape.layers + 2]
        self.parameters = install(models, self.buckets)
        self._in_use: list[Bucket] = []
        self._launch_limit = (
            LaunchLimit() if device.type == "cuda" and plan.crosses_islands(range(plan.world_size)) else None
        )
        for one in models:
            one.before_unit, one.before_backward = self.before_unit, self.before_backward
        self._where: dict[int, tuple[Bucket, Slot]] = {}
        self._begun: set[Bucket] = set()  # whose sums of this step are under way or done
        self._scattering: deque[ShardedBucket] = deque()
        self._whole: deque[ShardedBucket] = deque()
        self._hooks: list[RemovableHandle] = []
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                parameter = self.parameters[slot.name]
                self._where[id(parameter)] = (bucket, slot)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self.accumulate))
            bucket.release()

    def close(self) -> None:
        """Let go of the parameters: their hooks lead back here in a circle that no collector sees."""
        for hook in self._hooks:
            hook.remove()

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter of this stage -> its whole shape, of which a tensor group's ranks hold parts."""
        return {slot.name: slot.cut.whole for bucket in self.buckets for slot in bucket.layout.slots}

    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter of this stage, given whole, in every precision it is kept in."""
        for bucket in self.buckets:
            if any(slot.name == name for slot in bucket.layout.slots):
                bucket.assign(name, value)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step's gradients, and expect those of so many micro-batches."""
        self._begun.clear()
        self._scattering.clear()
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def synchronise(self) -> None:
        """Wait until every bucket is summed over its holders; start the sums that backward has not started."""
        for bucket in self.buckets:
            if bucket not in self._begun:
                self._start_sum(bucket)
        for bucket in self.buckets:
            if bucket.group is not None:
                others = tuple(r for r in bucket.layout.holders if r != self.rank)
                with self.timeline.span("sync", micro_batch=bucket.layout.key, peers=others, bridged=bucket.bridged):
                    bucket.finish_sum()
        self._whole.clear()
        for bucket in self.buckets if self.tensor.degree > 1 else ():
            bucket.sum_copies(self.tensor)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the shards that count on this rank, fp64: over all ranks, each element once."""
        total = self.buckets[0].gradient_shard.new_zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            for part in bucket.counted():
                total += torch.linalg.vector_norm(part).double().square()
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
        with self.timeline.span(WEIGHTS, micro_batch=bucket.layout.key, peers=others, bridged=self._far[bucket]):
            bucket.arrive()

    def _buckets_of(self, unit: int) -> list[Bucket]:
        found = [self._of_unit[unit]] if unit in self._of_unit else []
        return found + (self._tied if unit in self._ends else [])

    def shards(self) -> Iterable[tuple[Bucket, Slot, Interval]]:
        """(bucket, slot, elements) of every part of a parameter that this rank keeps."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                if part := bucket.part_of(slot):
                    yield bucket, slot, part

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient of one micro-batch, which has just been made."""
        bucket, slot = self._where[id(parameter)]
        assert parameter.grad is not None
        scattering = bucket.add(slot, parameter.grad)
        parameter.grad = None
        if scattering and isinstance(bucket, ShardedBucket):
            self._follow(bucket)
        if bucket.missing == 0 and self.overlap:
            self._start_sum(bucket)

    def _follow(self, bucket: ShardedBucket) -> None:
        """A bucket's whole gradient is on its way into shards: only a few may be."""
        if bucket in self._scattering:  # the one before has ended: this one is not the oldest
            self._scattering.remove(bucket)
        self._scattering.append(bucket)
        if len(self._scattering) > WHOLE_SCATTERS:
            self._scattering.popleft().settle()

    def _start_sum(self, bucket: Bucket) -> None:
        """Begin a bucket's sum. Of those that need a whole gradient for it only a few are under way at once.

        All holders sum layers from the last to the first, so nobody waits for who waits for him; a tied embedding's
        sum, which its last stage begins first and its first stage last, must not be waited for here.
        """
        self._begun.add(bucket)
        bucket.start_sum()
        if not isinstance(bucket, ShardedBucket) or bucket.group is None or bucket in self._tied:
            return
        self._whole.append(bucket)
        if len(self._whole) > WHOLE_SUMS:
            self._whole.popleft().finish_sum()


def shards_of(plan: Plan, place: Place, groups: ProcessGroups) -> Shards:
    """With whom a rank shares the state of its stage: runs of `shards` neighbours in the stage's order."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree, first = stage.tensor_parallel, place.part // stage.shards * stage.shards
    copy = stage.ranks[first * degree : (first + stage.shards) * degree]
    ranks = copy[place.tensor :: degree]
    return Shards(place.part - first, ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None, copy)


def shards_over(layout: BucketLayout, rank: int, groups: ProcessGroups) -> Shards:
    """The same with all holders of a bucket, in the order of their group: each keeps the state of an equal part."""
    ranks = tuple(sorted(layout.holders))
    return Shards(ranks.index(rank), ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None)


def may_share(plan: Plan, layout: BucketLayout) -> bool:
    """Whether all holders of a bucket can share out its state: the same answer on each of them.

    They cut parameters alike, and the ranks of a tensor group, who add up what several of them hold, keep like parts.
    """
    if layout.mixed:
        return False
    groups = next(g for g in (*(s.groups for s in plan.segments), plan.tied_groups()) if layout.holders in g)
    part = {rank: index for group in groups for index, rank in enumerate(sorted(group))}
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    together = (s.ranks[k : k + s.tensor_parallel] for s in stages for k in range(0, len(s.ranks), s.tensor_parallel))
    return all(len({part[r] for r in ranks if r in part}) <= 1 for ranks in together)


def tensor_share_of(plan: Plan, place: Place, groups: ProcessGroups) -> TensorShare:
    """A rank's place in the tensor group that computes its share of the samples."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree = stage.tensor_parallel
    if degree == 1:
        return ALONE
    ranks = stage.ranks[place.part * degree : (place.part + 1) * degree]
    return TensorShare(degree, place.tensor, groups.reduce_group(ranks))
