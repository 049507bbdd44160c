"""Buckets: a stage's parameters as a few flat buffers, the unit in which gradients are summed and state is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetctl.comm.operation.device import has_streams
from hetctl.trainer.gradients.layout import BucketLayout, Interval, Shards, Slot, aligned, take_parts, wholes_of
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.tensor_parallel import TensorShare

ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # new name from torch 2.12
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ShardPiece:
    """A part of the master shard that is updated in one way: master and gradient, flat, in full precision."""

    master: Tensor
    decays: bool


class Bucket:
    """One bucket's buffers on this rank: whole weights and gradient, this rank's shard of the masters.

    A `frozen` one has weights alone, which nothing changes.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shards: Shards,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
        bridged: bool,
        offload: bool = False,
        frozen: bool = False,
    ) -> None:
        self.layout, self.shards, self.group, self.bridged, self.frozen = layout, shards, group, bridged, frozen
        each = aligned(-(-layout.used // shards.count))
        self.interval: Interval = (shards.index * each, (shards.index + 1) * each)
        self.master_dtype = dtype if frozen else torch.promote_types(dtype, torch.float32)
        self.weights = torch.zeros(each * shards.count, dtype=dtype, device=device)  # what the model computes with
        self.weight_shard, self.gradient, self.gradient_shard = self._buffers(each)
        # what the optimiser updates, and by what
        self.masters, self.update_gradient = self.weight_shard, self.gradient_shard
        if offload:
            self.masters, self.update_gradient = (_hosted(self.masters, self.master_dtype) for _ in range(2))
        elif dtype != self.master_dtype:
            self.masters = self.weight_shard.to(self.master_dtype)
        self.pieces = () if frozen else tuple(self._pieces())
        self.arriving: Any = None  # the gathering of the weights
        self.summing: Any = None  # the sum of the gradients over all holders
        self.missing = 0  # gradients still to be accumulated in this step
        self._wholes: Tensor | None = None  # the gradient in whole parameters, while it is summed so
        self._fresh: set[str] = set()  # parameters whose first gradient of this step is still to come

    def _buffers(self, each: int) -> tuple[Tensor, Tensor, Tensor]:
        """(this rank's shard of the weights, the gradient, this rank's shard of it)."""
        gradient = self.weights.new_zeros(0 if self.frozen else len(self.weights), dtype=self.master_dtype)
        mine = slice(*self.interval)
        return self.weights[mine], gradient, gradient[mine]

    @property
    def counts(self) -> bool:
        """Whether this rank's shard counts in norms and checkpoints: each element on exactly one rank."""
        return self.layout.holders[0] in (self.shards.copy or self.shards.ranks)

    @property
    def scattered(self) -> bool:
        """Whether the holders are exactly those who share the state: then each needs only its shard of the sum."""
        return self.shards.count > 1 and self.shards.count == len(self.layout.holders) and not self.layout.mixed

    def assign(self, name: str, value: Tensor) -> None:
        """Set one parameter, given whole, in the model's precision and in this rank's masters."""
        slot = next(s for s in self.layout.slots if s.name == name)
        flat = slot.held_of(value.detach()).reshape(-1)
        with torch.no_grad():
            self._assign_weights(slot, flat)
            if self.pieces and (part := self.part_of(slot)):
                self.held_in(slot, lambda master: master).copy_(flat[slice(*part)])

    def _assign_weights(self, slot: Slot, flat: Tensor) -> None:
        self.weights[slot.first : slot.first + slot.numel].copy_(flat)

    def add(self, slot: Slot, gradient: Tensor) -> bool:
        """Accumulate one parameter's gradient of one micro-batch; whether a whole gradient begins to be scattered."""
        place = self.gradient[slot.first : slot.first + slot.numel]
        if slot.name in self._fresh:
            self._fresh.discard(slot.name)
            place.copy_(gradient.reshape(-1))  # what the last step left there need not be read, nor zeroed before
        else:
            place.add_(gradient.reshape(-1))
        self.missing -= 1
        return False

    def start_sum(self) -> None:
        """Begin summing the gradient over the holders; where they share the state, each gets its shard only."""
        if self.group is None:
            return
        if self.scattered and (not self.gradient.is_cpu or self.bridged):
            self.summing = REDUCE_SCATTER(self.gradient_shard, self.gradient, group=self.group, async_op=True)
        else:
            self.sum_up(self.gradient)

    def sum_up(self, gradient: Tensor) -> None:
        """Begin the sum of a whole bucket's gradient; where holders cut it unlike, in whole parameters."""
        self._wholes = wholes_of(self.layout, gradient) if self.layout.mixed else None
        summed = gradient[: self.layout.used] if self._wholes is None else self._wholes
        self.summing = dist.all_reduce(summed, group=self.group, async_op=True)

    def finish_sum(self) -> None:
        """Wait until `gradient_shard` is summed."""
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
            if self._wholes is not None:
                take_parts(self.layout, self._wholes, self._summed_into())
                self._wholes = None

    def _summed_into(self) -> Tensor:
        return self.gradient

    def counted(self) -> Iterator[Tensor]:
        """The parts of this rank's gradient shard that norms count here: over all ranks, each element once."""
        if self.counts:
            low, high = self.interval
            for first, past in _joined((s.first, s.past_room) for s in self.layout.slots if s.cut.counts):
                if max(low, first) < min(high, past):
                    yield self.gradient_shard[max(low, first) - low : min(high, past) - low]

    def sum_copies(self, tensor: TensorShare) -> None:
        """Add up the gradients of what several ranks of a tensor group hold, each having a share of its gradient."""
        for slot in self.layout.slots if not self.layout.mixed else ():
            if slot.cut.partial and (part := self.part_of(slot)):
                begin = slot.first + part[0] - self.interval[0]
                mine = self.gradient_shard[begin : begin + part[1] - part[0]]
                parts = slot.cut.whole[0] // slot.shape[0]
                every = mine.new_zeros(parts, len(mine))
                number = slot.cut.low // slot.shape[0]
                every[number] = mine
                dist.all_reduce(every, group=tensor.group)
                mine.copy_(every[number])

    def prepare_update(self) -> None:
        """Hand the optimiser its gradient where that is on the host."""
        if self.update_gradient is not self.gradient_shard:
            self.update_gradient.copy_(self.gradient_shard)

    def publish(self) -> None:
        """Give the model the updated masters: this rank's shard at once, the others' by the time they arrive."""
        if self.weight_shard.data_ptr() != self.masters.data_ptr():
            self.weight_shard.copy_(self.masters, non_blocking=True)
        if self.shards.group is not None:
            self.gather()

    def gather(self) -> None:
        """Begin making the weights whole. `.data`: what backward kept of them counts as unchanged."""
        self.arriving = ALL_GATHER(self.weights.data, self.weight_shard, group=self.shards.group, async_op=True)

    def prefetch(self) -> None:
        """The model will soon need the weights; here they are there, or on their way."""

    def arrive(self) -> None:
        """Wait until the weights are whole."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None

    def release(self) -> None:
        """The model has done with the weights for now; here they stay."""

    def begin_step(self, micro_batches: int) -> None:
        """Forget the gradient, and expect those of so many micro-batches."""
        self.missing = micro_batches * len(self.layout.slots)
        self._fresh = {slot.name for slot in self.layout.slots}

    def part_of(self, slot: Slot) -> Interval | None:
        """Which elements of a parameter lie in this rank's shard."""
        low, high = self.interval
        first, past = max(low, slot.first), min(high, slot.first + slot.numel)
        return (first - slot.first, past - slot.first) if first < past else None

    def held_in(self, slot: Slot, state: Callable[[Tensor], Tensor]) -> Tensor:
        """The elements of `part_of(slot)` in what `state` gives for the piece's master that holds them."""
        first, past = self.part_of(slot) or (0, 0)
        begin = slot.first + first - self.interval[0]
        for piece in self.pieces:
            if begin < piece.master.numel():
                return state(piece.master)[begin : begin + past - first]
            begin -= piece.master.numel()
        raise AssertionError(f"no piece holds '{slot.name}'")

    def split(self, flat: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """A flat tensor of this rank's shard in the parts that are updated alike, and whether they decay."""
        edge = min(max(self.layout.edge, self.interval[0]), self.interval[1]) - self.interval[0]
        yield from ((part, decays) for part, decays in ((flat[:edge], True), (flat[edge:], False)) if part.numel())

    def _pieces(self) -> Iterator[ShardPiece]:
        for (master, decays), (gradient, _) in zip(
            self.split(self.masters), self.split(self.update_gradient), strict=True
        ):
            master.grad = gradient
            yield ShardPiece(master, decays)


def install(models: Sequence[StageModel], buckets: Iterable[Bucket]) -> dict[str, nn.Parameter]:
    """Give the models parameters that are views of the buckets' weights; returns them by Hugging Face name."""
    views: dict[str, nn.Parameter] = {}
    for bucket in buckets:
        for slot in bucket.layout.slots:
            flat = bucket.weights[slot.first : slot.first + slot.numel]
            views[slot.name] = nn.Parameter(flat.view(slot.shape), requires_grad=not bucket.frozen)
    for model in models:
        for path, _ in list(model.named_parameters(remove_duplicate=False)):
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, views[model.full_name(path)])
    return views


def _joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Neighbouring intervals as one."""
    held: Interval | None = None
    for first, past in intervals:
        if held is not None and held[1] != first:
            yield held
            held = None
        held = (first if held is None else held[0], past)
    if held is not None:
        yield held


def _hosted(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of this size on the host, pinned where a device copies to and from them."""
    return torch.zeros(like.numel(), dtype=dtype, device="cpu", pin_memory=has_streams(like.device))
