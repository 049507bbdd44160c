"""A process group across islands: its parts, its messages, and how it fails and ends."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any

import torch

from hetctl.comm.bridge.bridge import MOST_TAG, P2P, Bridge
from hetctl.comm.bridge.failover import RailWatch
from hetctl.comm.bridge.transports import TransportSelector
from hetctl.comm.contract.natives import HOST, native_of
from hetctl.comm.contract.placement import Placement
from hetctl.comm.group.c10d_calls import Operations, check_plain_values
from hetctl.comm.group.call_order import CallOrder
from hetctl.comm.group.collectives import Collectives
from hetctl.comm.group.error_flag import ErrorFlag
from hetctl.comm.group.messages import AnySource, NativeMessage, PendingReceive
from hetctl.comm.group.native import Membership, NativeCommunicator, break_native, make_island
from hetctl.comm.group.runner import Runner
from hetctl.comm.operation.device import device_of_type
from hetctl.comm.operation.intervals import IslandLayout
from hetctl.comm.operation.recorder import RECORDER
from hetctl.comm.operation.store_connections import GroupStore
from hetctl.comm.operation.views import Returning, is_plain, memory_of, plain
from hetctl.comm.operation.work import BridgeError, HetWork, OperationDeadline, PrefixStore


class HetGroup(Operations):
    """A process group across islands, serving host and device tensors."""

    def __init__(self, options: Any, ranks: tuple[int, ...], placement: Placement) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._ranks, self._placement = ranks, placement
        self._timeout, self._name = options.timeout, str(options.group_id or "het")
        self._store, shared = options.store, GroupStore(options.store, self._name)
        self._layout = _layout(self._rank, ranks, placement)
        self._natives = {}
        self._make_natives()
        names = [self._who(r) for r in range(self._size)]
        self._calls = CallOrder()
        self._error_flag = ErrorFlag(
            shared.talk,
            rank=self._rank,
            names=names,
            on_verdict=self._end_all,
            overdue=lambda: self._runner.overdue(),
            waits=lambda: self._calls.waits(SLOW_SECONDS),
            told=self._calls.told,
        )
        self._runner = Runner(f"het collectives {self._name}", on_error=self._error_flag.report)
        self._error_flag.watch()
        self._watch = RailWatch(self._rank, shared.talk, self._who)
        self._transports_of = TransportSelector(
            self._rank, ranks, placement, shared.talk, timeout=self._timeout, watch=self._watch
        )
        self._transports_of.prepare()
        self._bridge = Bridge(
            self._rank,
            shared,
            timeout=self._timeout,
            verify=placement.verify_bridge,
            who=self._who,
            transport_to=self._transports_of.to,
            shared_by=self._shared_by,
            on_error=self._error_flag.report,
        )
        types = frozenset(self._device_type(island[0]) for island in self._layout.islands)
        self._collectives = Collectives(self._layout, self._native, self._bridge, types)
        _end_at_exit(self)
        self._any = AnySource(self._post_unbounded, tuple(r for r in range(self._size) if r != self._rank))

    def _make_natives(self) -> None:
        island = self._placement.island_of_rank[self._ranks[self._rank]]
        mine = tuple(self._ranks[r] for r in self._layout.mine)
        sockets = self._placement.spans_islands(mine)
        for name in sorted({island.torch_backend, native_of(device_type=HOST).torch_backend}):
            store = PrefixStore(f"native/{name}/{self._layout.home}/", self._store)
            member = Membership(store, self._layout.place, len(mine), self._timeout, sockets=sockets)
            self._natives[native_of(torch_backend=name).device_type] = make_island(name, member)

    def _native(self, device: torch.device) -> NativeCommunicator:
        native = self._natives.get(device.type)
        if native is None:
            raise BridgeError(f"tensors on '{device.type}' have no native communicator in this rank's island")
        return native

    def _device_type(self, rank: int) -> str:
        """What a rank of the group computes on."""
        return native_of(torch_backend=self._placement.island_of_rank[self._ranks[rank]].torch_backend).device_type

    def _shared_by(self, peer: int) -> torch.device | None:
        """This rank's device, if the peer computes on another type: one stream carries all tensors between them."""
        mine = self._device_type(self._rank)
        return None if mine == self._device_type(peer) else device_of_type(mine)

    def _who(self, rank: int) -> str:
        world, hosts = self._ranks[rank], self._placement.hosts
        return f"rank {world}" + (f" on {hosts[world]}" if world < len(hosts) else "")

    def _end_all(self, error: BridgeError) -> None:
        """The verdict on a failure anywhere: end what is pending, native parts too, and keep a record."""
        self._break(error)
        RECORDER.dump(self._ranks[self._rank], reason=str(error))

    def _break(self, error: BridgeError) -> None:
        self._runner.fail(error)
        self._bridge.fail(error)
        for native in list(self._natives.values()):
            break_native(native)

    def end_with_process(self, seconds: float) -> None:
        """See off what is being sent, for so long; end what waits for others, and the threads that do or ask the store.

        Others wait in Python once they rest, and may stay.
        """
        if self._bridge.error is not None or not self._bridge.sent(seconds) or self._runner.busy():
            self._break(BridgeError("the process is ending"))
            self._runner.close(seconds=THREADS_SECONDS)
            self._bridge.close(seconds=THREADS_SECONDS)
        else:
            self._runner.rest(seconds=THREADS_SECONDS)
            self._bridge.rest(seconds=THREADS_SECONDS)
        self._watch.close(seconds=THREADS_SECONDS)
        self._error_flag.close(seconds=THREADS_SECONDS)

    def shutdown(self) -> None:
        """Finish what is queued, then end threads and connections."""
        _live.discard(self)
        if self._any.under_way():  # receives that nothing will answer any more
            self._break(BridgeError(f"the process group '{self._name}' was destroyed"))
        seconds = 1.0 if self._bridge.error is not None else self._timeout.total_seconds()
        self._runner.close(seconds=seconds)
        self._bridge.close(seconds=seconds)
        self._error_flag.close()
        for native in self._natives.values():
            for group in native.groups:
                group.shutdown()
        self._natives = {}

    def abort(self) -> None:
        """End everything pending with an error, here and at the peers."""
        self._end_all(BridgeError(f"the process group '{self._name}' was aborted"))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        self._check_message(tensors, dst, tag)
        data, deadline, what = plain(tensors[0]), self._deadline(None), f"send to {self._who(dst)}"
        if self._layout.local(dst):
            place = self._layout.mine.index(dst)
            native = self._native(data.device).messenger(self._layout.place, place).send([data], place, tag)
            return self._local(what, tensors, native, peer=dst, deadline=deadline)
        work = HetWork(what, tensors, deadline=deadline)
        self._record(work, "send", peer=dst, tensors=tensors)
        self._bridge.send(data.view(-1), dst, tag=tag, kind=P2P, work=work, deadline=deadline)
        return self._noted(work)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        self._check_message(tensors, src, tag)
        target, deadline, what = memory_of(tensors[0]), self._deadline(None), f"recv from {self._who(src)}"
        if self._any.knows(tag):
            wanted = PendingReceive(what, tensors, deadline=deadline, on_error=self._error_flag.report_and_wait)
            if self._any.claims(target, src, tag, wanted):
                return self._noted(wanted)
        data = target if is_plain(target) else torch.empty_like(target, memory_format=torch.contiguous_format)
        if self._layout.local(src):
            place = self._layout.mine.index(src)
            native = self._native(target.device).messenger(place, self._layout.place).recv([data], place, tag)
            landing = None if data is target else data
            return self._local(what, tensors, native, peer=src, deadline=deadline, landing=landing)
        returning = data is not target
        work = Returning(what, target, data, deadline) if returning else HetWork(what, tensors, deadline=deadline)
        work.source = src
        self._record(work, "recv", peer=src, tensors=tensors)
        self._bridge.recv(data.view(-1), src, tag=tag, kind=P2P, work=work, deadline=deadline)
        return self._noted(work)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first, as gloo can (and device libraries cannot)."""
        _check_tag(tag)
        if not tensors[0].is_cpu:
            raise BridgeError("a receive from any source needs a host tensor: device libraries know none")
        deadline, failed = self._deadline(None), self._error_flag.report_and_wait
        work = PendingReceive("recv from any rank", tensors, deadline=deadline, on_error=failed)
        self._record(work, "recvAnySource", peer=None, tensors=tensors)
        self._any.recv(memory_of(tensors[0]), tag, work)
        return self._noted(work)

    def _check_message(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        """Raises ValueError or TypeError for a message that no transport carries, such as one to oneself."""
        _check_tag(tag)
        if peer == self._rank:
            raise ValueError("a rank cannot exchange messages with itself over the 'het' back end: copy the tensor")
        check_plain_values(tensors)

    def _post_unbounded(self, data: torch.Tensor, peer: int, tag: int) -> HetWork:
        """A receive that may stay unanswered for as long as the group lives."""
        forever, what = OperationDeadline(_FOREVER), f"recv from {self._who(peer)} among others"
        if not self._layout.local(peer):
            work = HetWork(what, [data])
            self._bridge.recv(data.view(-1), peer, tag=tag, kind=P2P, work=work, deadline=forever)
            return work
        native = self._native(data.device).group.recv([data], self._layout.mine.index(peer), tag)
        local = NativeMessage(what, [data], native=native, deadline=forever, on_error=BridgeError)
        threading.Thread(target=local.end, name="het any-source", daemon=True).start()
        return local

    def _local(
        self,
        what: str,
        tensors: list[torch.Tensor],
        native: Any,
        *,
        peer: int,
        deadline: OperationDeadline,
        landing: torch.Tensor | None = None,
    ) -> NativeMessage:
        """A native message of this rank's own island, with this group's way of failing."""
        failed = self._error_flag.report_and_wait
        work = NativeMessage(
            what,
            tensors,
            native=native,
            deadline=deadline,
            on_error=failed,
            landing=landing,
            pending_device_work=self._runner.pending_device_work,
        )
        work.source = peer
        entry = self._record(work, what.split()[0], peer=peer, tensors=tensors)
        if what.startswith("send"):  # nobody learns that it has ended unless the program waits for it
            entry.state, work.on_wait = "posted", entry.awaited
        self._noted(work)
        return work


_FOREVER = 3e8  # seconds
SLOW_SECONDS = 5.0  # a collective that takes longer has ranks compare what they called


def _check_tag(tag: int) -> None:
    """Raises ValueError for a tag that not every transport carries, whoever the peer is."""
    if not 0 <= tag <= MOST_TAG:
        raise ValueError(f"the tag of a message must be from 0 to {MOST_TAG}, not {tag}")


def _layout(rank: int, ranks: tuple[int, ...], placement: Placement) -> IslandLayout:
    position = {world: index for index, world in enumerate(ranks)}
    islands = placement.islands_of(ranks)
    return IslandLayout(rank, tuple(tuple(position[w] for w in members) for members in islands))


# A process that ends while operations are under way, by an exception as a rule: they are ended before Python is, which
# ends threads that ask for its lock then. In the middle of C++ that must not throw, that is an abort, and a launcher
# would see SIGABRT instead of the program's own exit code.
EXIT_SECONDS = 2.0  # for what is being sent
THREADS_SECONDS = 30.0  # for a group's threads to end: on a busy machine the store may take seconds to answer theirs
_live: weakref.WeakSet[HetGroup] = weakref.WeakSet()
_registered_in = 0  # the process whose end is watched: forked ones have the groups, but not their threads


def _end_at_exit(group: HetGroup) -> None:
    """Have a group end with this process, as long as anybody holds it."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        _live.clear()
        # before threads are joined, whose pools may have one that waits for a peer; `atexit` comes after that
        getattr(threading, "_register_atexit", atexit.register)(_end_live)
    _live.add(group)


def _end_live() -> None:
    if _registered_in == os.getpid():
        for group in list(_live):
            group.end_with_process(EXIT_SECONDS)
