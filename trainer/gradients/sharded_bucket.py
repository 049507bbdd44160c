"""Buckets of which a rank keeps only its shard: weights are gathered when a unit computes, gradients scattered at once.

Slower than keeping weights and gradients whole (each micro-batch moves them), and the way to train what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.trainer.gradients.buckets import REDUCE_SCATTER, Bucket
from hetctl.trainer.gradients.layout import Slot


class ShardedBucket(Bucket):
    """Weights whole only while they are computed with, gradient whole only for one micro-batch of one bucket."""

    def _buffers(self, each: int) -> tuple[Tensor, Tensor, Tensor]:
        self._full_bytes = self.weights.untyped_storage().nbytes()
        self._there = True
        self._incoming: Tensor | None = None
        self._arrived = 0
        self._scattering: tuple[Any, Tensor, Tensor] | None = None
        self._rest: Tensor | None = None
        weights = self.weights.new_zeros(each)
        gradient = torch.zeros(0 if self.frozen else each, dtype=self.master_dtype, device=self.weights.device)
        return weights, gradient, gradient

    def _assign_weights(self, slot: Slot, flat: Tensor) -> None:
        if part := self.part_of(slot):
            begin = slot.first + part[0] - self.interval[0]
            self.weight_shard[begin : begin + part[1] - part[0]].copy_(flat[slice(*part)])

    def add(self, slot: Slot, gradient: Tensor) -> bool:
        if self._incoming is None:
            self._incoming = self.gradient.new_zeros(self.weights.numel())
        self._incoming[slot.first : slot.first + slot.numel].add_(gradient.reshape(-1))
        self.missing -= 1
        self._arrived += 1
        if self._arrived < len(self.layout.slots):
            return False
        self._arrived = 0
        self._scatter()
        return True

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self.gradient.zero_()

    def start_sum(self) -> None:
        """Where others hold these layers too: the sum of whole gradients, each rank giving its shard and zeros."""
        self.settle()
        if self.group is None or self.scattered:
            return
        self._rest = self.gradient.new_zeros(self.weights.numel())
        self._rest[slice(*self.interval)].copy_(self.gradient)
        self.sum_up(self._rest)

    def finish_sum(self) -> None:
        self.settle()
        super().finish_sum()
        if self._rest is not None:
            self.gradient.copy_(self._rest[slice(*self.interval)])
            self._rest = None

    def _summed_into(self) -> Tensor:
        assert self._rest is not None
        return self._rest

    def publish(self) -> None:
        if self.weight_shard.data_ptr() != self.masters.data_ptr():
            self.weight_shard.copy_(self.masters, non_blocking=True)
        self.release()

    def prefetch(self) -> None:
        if not self._there and self.arriving is None:
            self.weights.untyped_storage().resize_(self._full_bytes)
            self.gather()

    def arrive(self) -> None:
        self.prefetch()
        super().arrive()
        self._there = True

    def release(self) -> None:
        if self.arriving is not None:
            super().arrive()
        self.weights.untyped_storage().resize_(0)
        self._there = False

    def _scatter(self) -> None:
        """Begin adding one micro-batch's gradient to the shards; the one before has had time to end."""
        self.settle()
        assert self._incoming is not None
        whole, group = self._incoming, self.shards.group
        if not whole.is_cpu:
            part = torch.empty_like(self.gradient)
            work = REDUCE_SCATTER(part, whole, group=group, async_op=True)
        else:
            part = whole[slice(*self.interval)]
            work = dist.all_reduce(whole, group=group, async_op=True)
        self._scattering = (work, part, whole)
        self._incoming = None

    def settle(self) -> None:
        """Wait until the last micro-batch's gradient is in the shards, and let go of the whole one."""
        if self._scattering is not None:
            work, part, _ = self._scattering
            self._scattering = None
            work.wait()
            self.gradient.add_(part)
