"""Gradients as sums: accumulated per bucket in full precision, summed over all holders once per step.

The gradient of a step is the sum over all samples' token losses divided by all valid tokens, never a mean of means.
A bucket's sum starts as soon as its last micro-batch's backward has passed it, while backward goes on below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hetctl.comm.contract.plan import Plan
from hetctl.trainer.gradients.buckets import Bucket, install
from hetctl.trainer.gradients.layout import Interval, Slot
from hetctl.trainer.gradients.sharded_bucket import ShardedBucket
from hetctl.trainer.gradients.unit_weights import UnitWeights
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.tensor_parallel import ALONE
from hetctl.trainer.ranks.timeline import Timeline

WHOLE_SCATTERS = 2  # micro-batch gradients of sharded buckets on their way into shards: each is a bucket's, whole
WHOLE_SUMS = 2  # sums of sharded buckets under way at once: each holds a bucket's whole gradient in full precision


class Gradients:
    """All buckets of a rank, from the first backward of a step to the weights of the next.

    `buckets` are those that are trained.
    """

    def __init__(
        self,
        models: Sequence[StageModel],
        buckets: Sequence[Bucket],
        plan: Plan,
        rank: int,
        *,
        overlap: bool = True,
        timeline: Timeline,
    ) -> None:
        self.every, self.rank, self.overlap, self.timeline = tuple(buckets), rank, overlap, timeline
        self.buckets = [bucket for bucket in self.every if not bucket.frozen]
        self.frozen = [bucket for bucket in self.every if bucket.frozen]
        self.tensor = models[0].tensor if models else ALONE  # a rank without a stage has no models, hence no buckets
        self.device = self.buckets[0].weights.device if self.buckets else torch.device("cpu")
        self.parameters = install(models, self.every)
        self.weights = UnitWeights(self.every, plan, rank, timeline=timeline)
        for one in models:
            one.before_unit, one.before_backward = self.weights.before_unit, self.weights.before_backward
        self._begun: set[Bucket] = set()  # whose sums of this step are under way or done
        self._scattering: deque[ShardedBucket] = deque()  # whole gradients of a micro-batch
        self._summing_whole: deque[ShardedBucket] = deque()
        self._where = {
            id(self.parameters[slot.name]): (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots
        }
        trained = (p for p in self.parameters.values() if p.requires_grad)
        self._hooks = [p.register_post_accumulate_grad_hook(self.accumulate) for p in trained]
        for bucket in self.every:
            bucket.release()

    def close(self) -> None:
        """Let go of the parameters: their hooks lead back here in a circle that no collector sees."""
        for hook in self._hooks:
            hook.remove()

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained parameter of this stage -> its whole shape, of which a tensor group's ranks hold parts."""
        return {slot.name: slot.cut.whole for bucket in self.buckets for slot in bucket.layout.slots}

    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter of this stage, given whole, in every precision it is kept in."""
        for bucket in self.every:
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
        self._summing_whole.clear()
        for bucket in self.buckets if self.tensor.degree > 1 else ():
            bucket.sum_copies(self.tensor)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the shards that count on this rank, fp64: over all ranks, each element once."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
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
        for bucket in self.every:
            bucket.arrive()

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
        if not isinstance(bucket, ShardedBucket) or bucket.group is None or bucket in self.weights.tied:
            return
        self._summing_whole.append(bucket)
        if len(self._summing_whole) > WHOLE_SUMS:
            self._summing_whole.popleft().finish_sum()
