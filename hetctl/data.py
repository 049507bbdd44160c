"""For programs of one's own: which samples of a step each rank takes, by its speed. In place of DistributedSampler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence, Sized

import torch
import torch.distributed as dist
import torch.utils.data

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.whole_shares import ended_soonest


def split(samples: int, speeds: Sequence[float]) -> list[int]:
    """How many of a step's samples each rank takes so that the slowest ends soonest; each at least one.

    Raises ConfigError for fewer samples than ranks.
    """
    if samples < len(speeds) or min(speeds) <= 0:
        raise ConfigError(
            f"{samples} samples a step cannot be shared by {len(speeds)} ranks of speeds {list(speeds)}",
            hint="a batch_size of at least one sample per rank, and speeds above 0",
        )
    return ended_soonest(samples, [1 / speed for speed in speeds], [1] * len(speeds))


class Sampler(torch.utils.data.Sampler[int]):
    """A rank's samples of every step, which are `batch_size` over all ranks.

    `DataLoader(data, batch_size=sampler.batch_size, sampler=sampler)`: the attribute is this rank's part, which follows
    `speeds`, by default those that `hetctl run` tells (of a plan: the samples it gives each rank). What all ranks take
    in a step is what one process would, with the same seed. Samples are repeated to fill up the last step, unless
    `drop_last`. `hetctl.ddp.weigh` makes gradients right.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int,
        speeds: Sequence[float] | None = None,
    ) -> None:
        replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        speeds = (told_speeds(replicas) if speeds is None else speeds) or [1.0] * replicas
        if len(speeds) != replicas:
            raise ConfigError(
                f"{len(speeds)} speeds are given for {replicas} ranks", hint="one for each, in rank order"
            )
        self.dataset, self.shuffle, self.seed, self.epoch = dataset, shuffle, seed, 0
        self.every = split(batch_size, speeds)
        self.batch_size, self.total = self.every[self.rank], batch_size
        rounded = len(dataset) if drop_last else len(dataset) + batch_size - 1
        self.steps = rounded // batch_size

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        first = sum(self.every[: self.rank])
        for begin in range(first, self.steps * self.total, self.total):
            yield from order[torch.arange(begin, begin + self.batch_size) % len(order)].tolist()

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Another order for each epoch, the same on all ranks."""
        self.epoch = epoch


def told_speeds(ranks: int) -> list[float] | None:
    """What each rank computes a second, against the slowest, as `hetctl run` knows; None, with a warning, if not."""
    told = os.environ.get(variables.SPEEDS)
    if told is None and ranks > 1:
        why = f"{variables.SPEEDS} is not set (by `hetctl run`, of devices that it knows)"
        warnings.warn(f"{why}: all ranks take equally many samples", stacklevel=3)
    return [float(speed) for speed in told.split(",")] if told else None
