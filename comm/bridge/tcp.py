"""The tcp transport: gloo pairs between two ranks, one per rail and direction, connected when first used."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.bridge.bridge import Bridge, LaneKey
from hetctl.comm.bridge.connecting import ConnectWait
from hetctl.comm.bridge.devices import Device, connect, main_device, main_interfaces
from hetctl.comm.bridge.failover import Loss, Movable, Position, RailWatch, remaining, route, say
from hetctl.comm.bridge.forwarded import ForwardedLane, RecvLane, SendLane
from hetctl.comm.bridge.lane_end import Flow, LaneEnd, Posted
from hetctl.comm.bridge.staging import CHUNK_BYTES, TRAILER_BYTES, CopyEngine, engine_for
from hetctl.comm.bridge.transports import Making
from hetctl.comm.contract import variables
from hetctl.comm.contract.units import KiB
from hetctl.comm.operation.device import accelerator
from hetctl.comm.operation.recorder import METER
from hetctl.comm.operation.store_connections import GroupStore
from hetctl.comm.operation.work import PrefixStore, Store, reason_of

MAIN = -1  # the rail of the data addresses, where two ends share no other network
DEVICE_RAILS = 8  # loopback moved 6.7 GB/s with one gloo group, 23.9 with eight
HOST_FLOW = Flow(CHUNK_BYTES, window=16)
# A chunk costs Python time, which bounds fast rails; of 4 or 16 MiB, or with other windows, large sums were slower.
# Messages of 8 to 32 MiB take 0.6 to 0.8 of the time in chunks of 2 to 4 MiB, which go over several rails.
DEVICE_FLOW = Flow(2 * CHUNK_BYTES - 4 * KiB, window=16, copies_ahead=4, least_bytes=CHUNK_BYTES // 2)
SMALL_BYTES = 64 * KiB  # less than any socket buffer holds
_KILL_TAG = 2**31 - 1
_MOVED_BIT = 2**22  # above it a tag says which loss moved a chunk; lanes with larger tags do not move
MOST_LOSSES = 8  # one bit each below the largest tag


@dataclass(frozen=True)
class TcpRail:
    """One gloo pair over one device; rank 0 of the pair sends, rank 1 receives.

    gloo writes to the socket in the thread that posts, until the socket takes no more: with fast devices that thread
    becomes the bound (5.5 GB/s where eight rails could move 30), so such rails post from a thread of their own.
    """

    name: str
    group: Any
    posting_thread: _PostingThread | None = None

    def post(self, call: Callable[[], Posted], nbytes: int) -> Posted:
        """Post now, or soon and in order from the rail's own thread."""
        return call() if self.posting_thread is None else self.posting_thread.post(call, nbytes)


class _PostingThread:
    """A rail's thread; what a socket takes at once is posted without it, where nothing is queued before."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock, self._queued = threading.Lock(), 0

    def post(self, call: Callable[[], Posted], nbytes: int) -> Posted:
        with self._lock:
            now = nbytes <= SMALL_BYTES and not self._queued
            self._queued += not now
        return call() if now else _QueuedPost(self._executor.submit(self._call, call))

    def _call(self, call: Callable[[], Posted]) -> Posted:
        try:
            return call()
        finally:
            with self._lock:
                self._queued -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _QueuedPost:
    """What a rail's thread will have posted."""

    future: Future[Posted]

    def wait(self, timeout: timedelta) -> bool | None:
        until = time.monotonic() + timeout.total_seconds()
        try:
            posted = self.future.result(timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("timed out") from None
        return posted.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


class TcpRails:
    """All rails from one rank to another, one direction. Both ends connect when they first use it."""

    def __init__(self, store: GroupStore, name: str, *, sending: bool, timeout: timedelta) -> None:
        self._store, self._name, self._sending, self._timeout = store, name, sending, timeout
        self._lock = threading.Lock()
        self._rails: list[TcpRail] = []
        self._devices: list[tuple[str, Device]] = []
        self._nics = 1  # at the end that has more of them
        self._killed = False

    @property
    def ways(self) -> int:
        """How many rails in turn should carry the same: several over one NIC share what it carries as they come."""
        return self._nics if len(self._rails) % self._nics == 0 else 1

    def rails(self, connect_wait: ConnectWait) -> list[TcpRail]:
        """The rails, connected; blocks until the other end connects too, for as long as it waits."""
        with connect_wait.holding(self._lock):
            if not self._rails and not self._killed:
                self._devices = _devices()
                agreed = self._agreed(self._store.talk, connect_wait)
                with self._store.waiting() as store:
                    self._rails = [self._connect(store, number, mine) for number, mine in agreed]
            if self._killed:
                raise RuntimeError("the connection was closed")
            return self._rails

    def _agreed(self, store: Store, connect_wait: ConnectWait) -> list[tuple[int, int]]:
        """(number, which of this end's) of the rails to connect: all of both ends' within the networks that they share,
        less those that are down at either end."""
        here, there = ("to", "from") if self._sending else ("from", "to")
        key, names = f"link/{self._name}/rails/", [name for name, _ in self._devices]
        up, networks, nics = [_is_up(n) for n in names], [_near().get(n, "") for n in names], len(set(names))
        store.set(key + here, json.dumps([up, networks, nics]))
        their_up, their_networks, their_nics = json.loads(connect_wait.value_of(store, key + there))
        self._nics = max(nics, their_nics)
        if self._sending:
            pairs = paired(networks, their_networks)
        else:
            pairs = [(mine, theirs) for theirs, mine in paired(their_networks, networks)]
        carry = [mine == MAIN or (up[mine] and their_up[theirs]) for mine, theirs in pairs]
        for number, (mine, _) in enumerate(pairs):
            if any(carry) and not carry[number]:
                say(f"rail {number} ({names[mine]}) is down at one end: link {self._name} goes without it")
        return [(number, mine) for number, (mine, _) in enumerate(pairs) if carry[number] or not any(carry)]

    def _connect(self, store: Store, index: int, mine: int) -> TcpRail:
        interface, device = self._devices[mine] if mine != MAIN else ("the data address", main_device())
        meeting, place = PrefixStore(f"link/{self._name}/{index}", store), 0 if self._sending else 1
        group = connect(device, meeting, place, 2, self._timeout, threads=1)
        name = f"rail {index} ({interface})"
        posting_thread = _PostingThread(f"het {name}") if accelerator() is not None else None
        return TcpRail(name, group, posting_thread)

    def kill(self) -> None:
        """End everything pending on these rails, here and at the other end, with an error."""
        self._killed = True
        for rail in list(self._rails):
            break_pair(rail.group, 1 if self._sending else 0)

    def close(self) -> None:
        for rail in self._rails:
            if rail.posting_thread is not None:
                rail.posting_thread.close()
        self._killed, self._rails, self._devices = True, [], []


class TcpTransport:
    """Lanes over links of gloo rails."""

    def __init__(self, watch: RailWatch) -> None:
        self._links: dict[tuple[bool, int], TcpRails] = {}
        self._watch = watch

    def lane(self, bridge: Bridge, key: LaneKey) -> ForwardedLane:
        link = self._links.get((key.sending, key.peer))
        if link is None:
            link = TcpRails(bridge.store, key.link_name(bridge.rank), sending=key.sending, timeout=bridge.timeout)
            self._links[key.sending, key.peer] = link
        made, engine = (SendLane if key.sending else RecvLane), engine_for(key.device)
        flow = DEVICE_FLOW if key.on_device else HOST_FLOW
        name = f"{key.link_name(bridge.rank)}/{key.wire_tag}"
        watch = functools.partial(self._watch.add, name, key.peer, sending=key.sending)
        return made(
            bridge,
            key,
            lambda connect_wait: TcpLaneEnd(link.rails(connect_wait), link.ways, engine, key, watch),
            flow=flow,
            engine=engine,
        )

    def kill(self) -> None:
        self._watch.stop()
        for link in list(self._links.values()):
            link.kill()

    def close(self) -> None:
        self._watch.close()
        for link in self._links.values():
            link.close()
        self._links = {}


def make(making: Making) -> TcpTransport:
    """What the table of transports names."""
    return TcpTransport(making.watch)


class TcpLaneEnd(LaneEnd):
    """One end of a lane over rails: chunks take the rails in turn, around those that are lost."""

    def __init__(
        self, rails: list[TcpRail], ways: int, engine: CopyEngine, key: LaneKey, watch: Callable[[Movable], None]
    ) -> None:
        self._rails, self._engine, self._key, self._watch = rails, engine, key, watch
        self.ways = ways
        self._peer = 1 if key.sending else 0  # in a rail's pair
        self._losses: list[Loss] = []

    def rail(self, position: Position) -> str:
        return self._rails[self.route(position)].name

    def movable(self) -> bool:
        left = len(remaining(len(self._rails), self._losses))
        return left > 1 and self._key.wire_tag < _MOVED_BIT and len(self._losses) < MOST_LOSSES

    def route(self, position: Position) -> int:
        return route(position, len(self._rails), self._losses)[0]

    def lose(self, loss: Loss) -> str:
        if not self.movable() or loss.rail in {known.rail for known in self._losses}:
            return ""
        self._losses.append(loss)
        return self._rails[loss.rail].name

    def cut(self, rail: int) -> None:
        break_pair(self._rails[rail].group, self._peer)

    def watch(self, window: Movable) -> None:
        if self.movable():
            self._watch(window)

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        return self._engine.take(nbytes)

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        METER.touch(length)
        number, moved = route(position, len(self._rails), self._losses)
        whole, rail, tag = slot[: length + TRAILER_BYTES], self._rails[number], self._key.wire_tag
        if moved:  # an order of their own, apart from what this rail carries anyway
            tag |= _MOVED_BIT << (moved - 1)
        start = rail.group.send if self._key.sending else rail.group.recv
        try:
            return rail.post(lambda: start([whole], self._peer, tag), length)
        except RuntimeError as error:
            if not self.movable():
                raise
            return _Refused(error)

    def give(self, slot: torch.Tensor, event: Any) -> None:
        self._engine.give(slot, event)


@dataclass(frozen=True)
class _Refused:
    """A chunk that a broken rail did not take."""

    error: RuntimeError

    def wait(self, timeout: timedelta) -> bool | None:
        raise self.error


def break_pair(group: Any, peer: int) -> None:
    """Close a gloo context: gloo does so, for all that is pending, when any one receive on it times out."""
    try:
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _KILL_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def paired(to: Sequence[str], back: Sequence[str]) -> list[tuple[int, int]]:
    """Which rail of one end goes with which of the other's, by the networks they are on: each with one of its own,
    those of an end that has fewer several times, networks in turn. Without a common one: the data addresses'."""
    found: list[tuple[int, int, int]] = []
    for network in dict.fromkeys(n for n in to if n in back):
        ends = [[i for i, name in enumerate(side) if name == network] for side in (to, back)]
        count = max(map(len, ends))
        found += [(turn, ends[0][turn % len(ends[0])], ends[1][turn % len(ends[1])]) for turn in range(count)]
    found.sort(key=lambda pair: pair[0])
    return [(mine, theirs) for _, mine, theirs in found] or [(MAIN, MAIN)] * max(len(to), len(back))


def _is_up(interface: str) -> bool:
    """Whether an interface carries traffic now; those that do not say (and a default one) do."""
    state = Path("/sys/class/net") / interface / "operstate"
    return not state.exists() or state.read_text().strip() not in ("down", "lowerlayerdown", "notpresent")


def _interfaces() -> list[str]:
    """The network interfaces of this rank's rails: those near its device, as the launcher says, else gloo's own."""
    return [n for n in _near() if _has_address(n)] or main_interfaces()


@functools.cache
def _has_address(interface: str) -> bool:
    """Whether gloo can listen there: an interface may have lost its address, or its name, since it was discovered."""
    try:
        Device(interface)
    except RuntimeError as error:
        say(f"no rail over {interface}: {reason_of(error)}")
        return False
    return True


def _near() -> dict[str, str]:
    """Interface -> network, of `HETCTL_NICS=ens1@roce0,ens2@roce0`."""
    words = [word.partition("@") for word in os.environ.get(variables.NICS, "").split(",") if word]
    return {name: network for name, _, network in words}


class _Devices(list[tuple[str, Device]]):
    """(interface, gloo device) for each rail; a device is a listening socket and its thread, closed with its last user.

    All links of a process share them, and keep them: the process itself only knows them while they are kept.
    """


_SHARED = weakref.WeakValueDictionary[tuple[str, ...], _Devices]()
_SHARING = threading.Lock()


def _devices() -> list[tuple[str, Device]]:
    """The devices of this process, made anew where no link has any."""
    names = _interfaces()
    count = int(os.environ.get(variables.RAILS) or max(len(names), DEVICE_RAILS if accelerator() is not None else 1))
    taken = tuple(names[i % len(names)] if names else "" for i in range(count))
    with _SHARING:
        found = _SHARED.get(taken)
        if found is None:
            found = _SHARED[taken] = _Devices((name or "default interface", Device(name)) for name in taken)
        return found
