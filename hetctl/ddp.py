"""For programs of one's own: gradients of DistributedDataParallel where ranks' batches are unequal, exactly.

DDP divides the sum of ranks' gradients by their number, as if each had as many samples. Here each counts by its own.
"""

# no `from __future__ import annotations`: DDP compares the hook's annotations with classes
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hetctl.comm.contract.errors import ConfigError
from hetctl.data import Sampler


@dataclass
class Weights:
    """What this rank's gradient counts: the state of the communication hook `weighted_sum`."""

    group: Any = None  # of the model's replicas; None: all ranks
    share: float | None = None  # of a step's samples; None: `count` says each step what it has
    _mine: float = 0.0
    _all: Tensor | None = None
    _counting: Any = field(default=None, repr=False)

    def count(self, amount: float, device: torch.device | str = "cpu") -> None:
        """Before a backward that sums: how many tokens (or samples) the mean that is this rank's loss is over.

        `device` is where the count is summed over the ranks: a GPU's, where gradients are there, spares a wait.
        """
        self._mine, self._all = amount, torch.tensor(float(amount), dtype=torch.float64, device=device)
        self._counting = dist.all_reduce(self._all, group=self.group, async_op=True)

    def factor(self) -> Tensor | float:
        """What to multiply this rank's gradient with before the sum. Raises ConfigError where nothing was counted."""
        if self.share is not None:
            return self.share
        if self._all is None:
            raise ConfigError("nothing was counted before backward", hint="weights.count(tokens) in every step")
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        return self._mine / self._all


def weigh(model: DistributedDataParallel, sampler: Sampler | None = None) -> Weights:
    """Let every rank's gradient count by its samples; without a sampler by what `count` of the result says each step.

    Call it before the first forward. The loss of a rank is the mean over its samples (tokens), as usual.
    """
    share = None if sampler is None else sampler.batch_size / sampler.total
    weights = Weights(model.process_group, share)
    model.register_comm_hook(weights, weighted_sum)
    return weights


def weighted_sum(weights: Weights, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook (of Lightning's DDPStrategy too: `ddp_comm_state=Weights(...)`)."""
    buffer = bucket.buffer()
    factor = weights.factor()
    buffer.mul_(factor.to(buffer.device, buffer.dtype) if isinstance(factor, Tensor) else factor)
    work = dist.all_reduce(buffer, group=weights.group, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda _: buffer)
    return summed
