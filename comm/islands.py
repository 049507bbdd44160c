"""An island's native communicator behind one small set of calls, the same for every vendor and for an island of one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from hetctl.comm.c10d import Gloo, Store
from hetctl.comm.rails import break_pair
from hetctl.comm.work import Deadline, NativeFailed


class Native:
    """One island's communicator for one device type; ranks are places within the island, tensors contiguous.

    Every call starts the operation and returns torch's handle (None where there is nothing to wait for).
    """

    def __init__(self, group: Any, *, size: int) -> None:
        self.group = group
        self.size = size

    def all_reduce(self, data: torch.Tensor, op: Any) -> Any:
        if self.size == 1:
            return None
        options = AllreduceOptions()
        options.reduceOp = op
        return self.group.allreduce([data], options)

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor, op: Any) -> Any:
        if self.size == 1:
            out.copy_(data)
            return None
        options = ReduceScatterOptions()
        options.reduceOp = op
        return self.group._reduce_scatter_base(out, data, options)

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> Any:
        if self.size == 1:
            out.copy_(data)
            return None
        return self.group._allgather_base(out, data, AllgatherOptions())

    def broadcast(self, data: torch.Tensor, root: int) -> Any:
        if self.size == 1:
            return None
        options = BroadcastOptions()
        options.rootRank = root
        return self.group.broadcast([data], options)

    def gather(self, outs: Sequence[torch.Tensor], data: torch.Tensor, *, root: int, me: int) -> Any:
        """`outs`, on the root only: one tensor per place."""
        if self.size == 1:
            outs[0].copy_(data)
            return None
        options = GatherOptions()
        options.rootRank = root
        return self.group.gather([list(outs)] if me == root else [], [data], options)

    def scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, root: int, me: int) -> Any:
        """`parts`, on the root only: one tensor per place."""
        if self.size == 1:
            out.copy_(parts[0])
            return None
        options = ScatterOptions()
        options.rootRank = root
        return self.group.scatter([out], [list(parts)] if me == root else [], options)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, *, out_counts: list[int], counts: list[int]) -> Any:
        """Flat tensors cut by counts of elements per place."""
        if self.size == 1:
            out.copy_(data)
            return None
        return self.group.alltoall_base(out, data, out_counts, counts, AllToAllOptions())


def settle(work: Any, deadline: Deadline, *, what: str) -> None:
    """Wait for a native operation until the deadline. Raises NativeFailed naming the operation."""
    if work is None:
        return
    try:
        ended = work.wait(deadline.delta())
    except RuntimeError as error:
        detail = str(error).strip().splitlines()[0][:200]
        late = f"it did not end within {deadline.seconds:g} s" if deadline.passed() else detail
        raise NativeFailed(f"{what} failed inside its island: {late}") from None
    if ended is False:
        raise NativeFailed(f"{what} failed inside its island: it was aborted")


def break_native(native: Native) -> None:
    """End everything pending in an island's communicator, so that nobody waits for a rank that is gone."""
    if native.group is None:
        return
    if isinstance(native.group, Gloo):
        break_pair(native.group, 1 if native.group.rank() == 0 else 0)
    else:
        native.group.abort()


def make_native(store: Store, backend: str, *, place: int, size: int, timeout: timedelta) -> Any:
    """The native group of an island, by its torch name; members only, all of them at once."""
    if backend == "gloo":
        options = Gloo._Options()
        options._timeout = timeout
        options._devices = [Gloo.create_default_device()]
        return Gloo(store, place, size, options)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, size, nccl)
