"""Where ranks wait for each other's files: disks, tokenisers and copies differ by more than a step's operation may."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FILES_SECONDS = 3600.0  # of one operation; a rank that ends is noticed at once all the same, by its agent


def make_file_group() -> Any:
    """A group of all ranks, for nothing but files; all ranks call it."""
    return dist.new_group(timeout=timedelta(seconds=FILES_SECONDS))


def meet(group: Any = None) -> None:
    """Wait for all ranks of a group, by a host tensor: a device's library would make a communicator for its barrier."""
    dist.all_reduce(torch.zeros(1), group=group)
