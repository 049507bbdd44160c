"""An island's native communicator behind one small set of calls, the same for every vendor and for an island of one."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
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

from hetctl.comm.bridge.devices import connect, main_device
from hetctl.comm.bridge.tcp import break_pair
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import HOST, native_of
from hetctl.comm.operation.work import Gloo, NativeFailed, OperationDeadline, PrefixStore, Store, reason_of

ABORT_SECONDS = 5.0  # communicators that take longer are left to themselves
NATIVE_GRACE = timedelta(seconds=60)  # NCCL's watchdog ends the process, so a `het` group's own deadline comes first
GLOO_THREADS = 2  # of a group, which end its operations


class NativeCommunicator:
    """One island's communicator for one device type; ranks are places within the island, tensors contiguous.

    Every call starts the operation and returns its handle (None where there is nothing to wait for).
    """

    def __init__(self, group: Any, *, size: int, second: Any = None, upward: Any = None, downward: Any = None) -> None:
        self.group, self._second = group, second or group
        self._upward, self._downward = upward or group, downward or group
        self.groups = [g for g in (group, second, upward, downward) if g is not None]  # all, each once
        self.size = size
        self._on_host = isinstance(group, Gloo)
        # gloo's threads own an operation's tensors for a moment longer than `wait` takes. As the last owner of one that
        # Python knows, too, a thread asks for Python's lock, and is ended where Python ends: an abort, in its C++
        self._latest: deque[Any] = deque(maxlen=GLOO_THREADS * len(self.groups))

    def all_reduce(self, data: torch.Tensor, op: Any) -> StartedNative | None:
        if self.size == 1:
            return None
        options = AllreduceOptions()
        options.reduceOp = op
        carried = _carried(data)
        back = None if carried is data else functools.partial(data.copy_, carried)
        return self._started(self.group.allreduce([carried], options), back)

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor, op: Any) -> StartedNative | None:
        if self.size == 1:
            out.copy_(data)
            return None
        options = ReduceScatterOptions()
        options.reduceOp = op
        carried = _carried(data)
        into = out if carried is data else out.new_empty(out.shape, dtype=carried.dtype)
        back = None if into is out else functools.partial(out.copy_, into)
        return self._started(self.group._reduce_scatter_base(into, carried, options), back)

    def all_gather(self, out: torch.Tensor, data: torch.Tensor, *, second: bool = False) -> StartedNative | None:
        """`second` halves of collectives have a communicator of their own: first halves of later ones overtake them."""
        if self.size == 1:
            out.copy_(data)
            return None
        group = self._second if second else self.group
        # as bytes: what is only moved may be of types that the library cannot reduce
        moved = group._allgather_base(out.view(torch.uint8), data.view(torch.uint8), AllgatherOptions())
        return self._started(moved)

    def broadcast(self, data: torch.Tensor, root: int) -> StartedNative | None:
        if self.size == 1:
            return None
        options = BroadcastOptions()
        options.rootRank = root
        return self._started(self.group.broadcast([data], options))

    def all_to_all(
        self, out: torch.Tensor, data: torch.Tensor, *, out_counts: list[int], counts: list[int]
    ) -> StartedNative | None:
        """Flat tensors cut by counts of elements per place."""
        if self.size == 1:
            out.copy_(data)
            return None
        return self._started(self.group.alltoall_base(out, data, out_counts, counts, AllToAllOptions()))

    def messenger(self, source: int, target: int) -> Any:
        """The group that carries messages between two places in one direction.

        A device library runs what one pair was given in order, so that two ranks which both send first would wait for
        each other for ever: each direction has a communicator of its own.
        """
        return self._upward if source < target else self._downward

    def _started(self, work: Any, back: Callable[[], object] | None = None) -> StartedNative:
        if self._on_host:
            self._latest.append(work)
        return StartedNative(work, on_host=self._on_host, back=back)


@dataclass(frozen=True)
class StartedNative:
    """A native operation that was started, whether it runs on the host, and what gives its result back."""

    work: Any
    on_host: bool
    back: Callable[[], object] | None = None


def settle(started: StartedNative | None, deadline: OperationDeadline, *, what: str) -> None:
    """Wait for a native operation: the host until the deadline, a device by ordering the current stream behind it.

    Raises NativeFailed naming the operation. (Given a timeout, NCCL's `wait` would block the host.)
    """
    if started is None:
        return
    try:
        ended = started.work.wait(deadline.delta()) if started.on_host else started.work.wait()
    except RuntimeError as error:
        late = deadline.verdict if deadline.passed() else reason_of(error)
        raise NativeFailed(f"{what} failed inside its island: {late}") from None
    if ended is False:
        raise NativeFailed(f"{what} failed inside its island: it was aborted")
    if started.back is not None:
        started.back()


def _carried(data: torch.Tensor) -> torch.Tensor:
    """What a native library reduces in the place of `data`: none of them knows int16, whose bits int32 gets right."""
    return data.to(torch.int32) if data.dtype == torch.int16 else data


def make_island(backend: str, member: Membership) -> NativeCommunicator:
    """An island's Native over the torch back end of that name; for device libraries one more per direction."""
    if member.size == 1:
        return NativeCommunicator(None, size=1)
    on_host = native_of(torch_backend=backend).device_type == HOST
    collectives, messages = ("group", "second"), () if on_host else ("upward", "downward")
    timeout, made = member.timeout if on_host else member.timeout + NATIVE_GRACE, {}
    for name in (*collectives, *messages):
        store = PrefixStore(f"{name}/", member.store)
        made[name] = make_native(backend, replace(member, store=store, timeout=timeout, ahead=name in collectives))
    return NativeCommunicator(made.pop("group"), size=member.size, **made)


def break_native(native: NativeCommunicator) -> None:
    """End everything pending in an island's communicators, so that nobody waits for a rank that is gone.

    A device library's go all at once: one that is ended frees memory, for which the device waits for the others'
    kernels, which may hang.
    """
    aborts = []
    for group in native.groups:
        if isinstance(group, Gloo):
            break_pair(group, 1 if group.rank() == 0 else 0)
        else:
            aborts.append(threading.Thread(target=_abort, args=(group,), name="het abort", daemon=True))
    for abort in aborts:
        abort.start()
    end = time.monotonic() + ABORT_SECONDS
    for abort in aborts:
        abort.join(max(end - time.monotonic(), 0))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # what it says of itself is no news in a group that failed
        group.abort()


@dataclass(frozen=True)
class Membership:
    """What a native group is made of: where its members meet, and who of them this process is.

    `ahead`: its kernels go before the program's, because other islands wait for what they give. `sockets`: its members
    reach no common RDMA network, so between hosts it takes sockets, whatever the library would choose.
    """

    store: Store
    place: int
    size: int
    timeout: timedelta
    ahead: bool = False
    sockets: bool = False


def make_native(backend: str, membership: Membership) -> Any:
    """The native group of an island, by its torch name; members only, all of them at once. Raises ConfigError."""
    if backend not in MAKERS:
        raise ConfigError(
            f"nobody here makes native groups of '{backend}'", hint=f"comm/group/native.py makes {', '.join(MAKERS)}"
        )
    return MAKERS[backend](membership)


def _make_gloo(member: Membership) -> Any:
    device = main_device()
    return connect(device, member.store, member.place, member.size, member.timeout, threads=GLOO_THREADS)


def _make_nccl(member: Membership) -> Any:
    if member.sockets and (asked := os.environ.get("NCCL_NET", "Socket")) != "Socket":
        raise ConfigError(
            f"islands joined natively talk over sockets, but NCCL_NET={asked} overrides that",
            hint="unset it there",
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=member.ahead)
    options._timeout = member.timeout
    if member.sockets:
        config: Any = options.config  # torch's stubs do not list it
        config.net_name = "Socket"
    return dist.ProcessGroupNCCL(member.store, member.place, member.size, options)


def _make_xccl(member: Membership) -> Any:
    """From torch's own signatures; it has never run here."""
    if member.sockets:
        raise ConfigError("xccl is not joined natively over sockets here", hint="--bridge tcp")
    made = getattr(dist, "ProcessGroupXCCL", None)
    if made is None:
        raise ConfigError(
            f"torch {torch.__version__} here has no xccl", hint="pip install torch --index-url pytorch.org's /whl/xpu"
        )
    options = made.Options(is_high_priority_stream=member.ahead)
    options._timeout = member.timeout
    return made(member.store, member.place, member.size, options)


MAKERS: dict[str, Callable[[Membership], Any]] = {  # by torch's name
    "gloo": _make_gloo,
    "nccl": _make_nccl,
    "xccl": _make_xccl,
}
