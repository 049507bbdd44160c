"""An island's native communicator behind one small set of calls, the same for every vendor and for an island of one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from hetctl.comm.c10d import Gloo, Store
from hetctl.comm.rails import break_pair, main_device
from hetctl.comm.work import Deadline, NativeFailed


class Native:
    """One island's communicator for one device type; ranks are places within the island, tensors contiguous.

    Every call starts the operation and returns its handle (None where there is nothing to wait for).
    """

    def __init__(self, group: Any, *, size: int) -> None:
        self.group = group
        self.size = size
        self._on_host = isinstance(group, Gloo)

    def all_reduce(self, data: torch.Tensor, op: Any) -> Started | None:
        if self.size == 1:
            return None
        options = AllreduceOptions()
        options.reduceOp = op
        return self._started(self.group.allreduce([data], options))

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor, op: Any) -> Started | None:
        if self.size == 1:
            out.copy_(data)
            return None
        options = ReduceScatterOptions()
        options.reduceOp = op
        return self._started(self.group._reduce_scatter_base(out, data, options))

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> Started | None:
        if self.size == 1:
            out.copy_(data)
            return None
        return self._started(self.group._allgather_base(out, data, AllgatherOptions()))

    def broadcast(self, data: torch.Tensor, root: int) -> Started | None:
        if self.size == 1:
            return None
        options = BroadcastOptions()
        options.rootRank = root
        return self._started(self.group.broadcast([data], options))

    def all_to_all(
        self, out: torch.Tensor, data: torch.Tensor, *, out_counts: list[int], counts: list[int]
    ) -> Started | None:
        """Flat tensors cut by counts of elements per place."""
        if self.size == 1:
            out.copy_(data)
            return None
        return self._started(self.group.alltoall_base(out, data, out_counts, counts, AllToAllOptions()))

    def _started(self, work: Any) -> Started:
        return Started(work, on_host=self._on_host)


@dataclass(frozen=True)
class Started:
    """A native operation that was started, and whether it runs on the host."""

    work: Any
    on_host: bool


def settle(started: Started | None, deadline: Deadline, *, what: str) -> None:
    """Wait for a native operation: the host until the deadline, a device by ordering the current stream behind it.

    Raises NativeFailed naming the operation. (Given a timeout, NCCL's `wait` would block the host.)
    """
    if started is None:
        return
    try:
        ended = started.work.wait(deadline.delta()) if started.on_host else started.work.wait()
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
        options._devices = [main_device()]
        return Gloo(store, place, size, options)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, size, nccl)
