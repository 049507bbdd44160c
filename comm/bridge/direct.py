"""The direct bridge: slots of registered memory that an engine writes into the peer's, on hosts (rdma) or devices.

A lane is a ring of slots at each end. The sender fills its slot, the engine moves it into the receiver's slot of the
same number, and a byte on the control connection says so; another byte back says that the slot is free. Where the
receiver must be the one who initiates, it reads instead. Slots take the ports in turn (`rdma_ports.py`). Nothing is
staged elsewhere, and nothing reads a slot before its transfer is over and, on devices, made visible.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch

from hetctl.comm.bridge.bridge import P2P, Bridge, LaneKey
from hetctl.comm.bridge.connecting import ConnectWait, Control, accept, offer
from hetctl.comm.bridge.device_memory import allocate, flush_for, pin, registrable_device, unpin
from hetctl.comm.bridge.engines.base import PEER_COPY, EnginePort, Memory, Region
from hetctl.comm.bridge.engines.shared import SharedEngines, use, wires_here
from hetctl.comm.bridge.failover import Position, say
from hetctl.comm.bridge.forwarded import ForwardedLane, RecvLane, SendLane
from hetctl.comm.bridge.lane_end import TRAILER_ROOM, Flow, Posted, RingEnd, RingTransport
from hetctl.comm.bridge.rdma_ports import POLL_SECONDS, LaneTransfers, connect, described
from hetctl.comm.bridge.staging import TRAILER_BYTES, engine_for
from hetctl.comm.bridge.transports import Making
from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.comm.contract.units import MiB
from hetctl.comm.operation.work import BridgeError

HOST_FLOW = Flow(4 * MiB, window=8)
# A chunk costs Python time, in which a peer copy moves about as much as the chunk has (no NIC does). A copy within a
# device is over before that: a slot that waits for a second one is a slot that is not on its way.
DEVICE_FLOW = Flow(32 * MiB, window=4, copies_ahead=0)
PEER_MESSAGES = Flow(64 * MiB, window=4, copies_ahead=0)
SERVE_SECONDS = 1e-3  # between turns of an engine that has no thread of its own, while a lane waits

Initiator = Literal["sender", "receiver", "lower"]  # who moves the bytes; `lower` is the lower rank, both ways
# Who makes contact before there is anything to move: nobody, the lower rank, or both ends in turn, the lower one first.
Introduce = Literal["none", "lower", "both"]


@dataclass(frozen=True)
class DirectMode:
    """How a direct transport goes: over which engine, with which memory, called what."""

    label: str  # rdma, direct or what `engines.base.PEER_COPY` says
    on_device: bool
    initiator: Initiator = "sender"
    introduce: Introduce = "none"
    flush: Callable[[], None] | None = None  # before anything reads what arrived in device memory


class DirectTransport(RingTransport["DirectLaneEnd"]):
    """Lanes over an engine, one ring at each end of each."""

    def __init__(self, engines: SharedEngines, mode: DirectMode) -> None:
        super().__init__()
        self._engines, self._mode = engines, mode

    def lane(self, bridge: Bridge, key: LaneKey) -> ForwardedLane:
        made = SendLane if key.sending else RecvLane
        flow = HOST_FLOW
        if self._mode.on_device:
            flow = PEER_MESSAGES if self._mode.label == PEER_COPY and key.kind == P2P else DEVICE_FLOW
        connect = functools.partial(self._connect, bridge, key, flow)
        return made(bridge, key, connect, flow=flow, engine=engine_for(key.device))

    def _connect(self, bridge: Bridge, key: LaneKey, flow: Flow, connect_wait: ConnectWait) -> DirectLaneEnd:
        ring = Ring(self._engines.rails, flow, key.device, on_device=self._mode.on_device)

        def lose(port: str, why: str) -> None:
            if self._engines.lose(port, why):
                say(
                    f"{self._mode.label} {'to' if key.sending else 'from'} {bridge.who(key.peer)} without {port}: {why}"
                )

        name = f"{self._mode.label}/{key.link_name(bridge.rank)}/{key.wire_tag}"
        try:
            meet = accept if key.sending else offer
            about = {"ports": described(self._engines.rails, ring.regions), "address": ring.memory.data_ptr()}
            control, peer = meet(bridge.store.talk, name, about, connect_wait)
            pull = self._pulls(bridge.rank, key)
            found = connect(self._engines.rails, ring.regions, peer["ports"], lose)
            transfers = LaneTransfers(found, int(peer["address"]), lose, write=not pull)
            end = DirectLaneEnd(ring, transfers, control, key, self._mode, pull=pull, stop=self._stop)
            end.introduce(lower=bridge.rank < key.peer, timeout=bridge.timeout)
        except BaseException:
            ring.close()
            raise
        return self.hold(end)

    def _pulls(self, rank: int, key: LaneKey) -> bool:
        """Whether the receiver of a lane reads, instead of its sender writing."""
        sender, receiver = (rank, key.peer) if key.sending else (key.peer, rank)
        return {"sender": False, "receiver": True, "lower": receiver < sender}[self._mode.initiator]

    def close(self) -> None:
        """End the lanes' rings, and the engine if nobody else uses it."""
        ends = self.end()
        if ends is None:
            return
        sent = sum(end.sent for end in ends)
        self._engines.close(way=self._mode.label, sent=sent, staged=0 if self._mode.on_device else sent)


def make(making: Making) -> DirectTransport:
    """What the table of transports names, for both kinds of memory. Raises ConfigError or BridgeError."""
    choice = making.choice
    assert choice.engine is not None, "a transport over an engine is chosen with one"
    wires, lacking = wires_here(local=making.local and registrable_device() is not None)
    if wires is None:
        raise BridgeError(lacking)
    on_device = TRANSPORTS[choice.kind].device_memory
    # a peer copy is over, and visible, when the sender hears of its end: only NICs need more
    flush = flush_for(making.device.index or 0)[0] if on_device and choice.label != PEER_COPY else None
    asked = os.environ.get(variables.INITIATOR) or "sender"
    if asked not in get_args(Initiator):
        raise ConfigError(f"{variables.INITIATOR}={asked} is nobody", hint=", ".join(get_args(Initiator)))
    initiator: Initiator = asked  # type: ignore[assignment]
    # Mooncake's connections break when both ends call each other at once; for peer copies NIXL has no thread
    introduce: Introduce = "lower" if choice.engine == "mooncake" else "both" if wires.local else "none"
    held = use(choice.engine, wires.without(making.lost))
    for port, why in making.lost.items():
        if held.lose(port, why):
            say(f"{choice.label} goes without {port}: {why}")
    return DirectTransport(held, DirectMode(choice.label, on_device, initiator, introduce, flush))


class Ring:
    """Slots registered with every port: host memory (pinned for the device that copies from it) or device memory."""

    def __init__(self, rails: Sequence[EnginePort], flow: Flow, device: torch.device, *, on_device: bool) -> None:
        self._rails, self.window = rails, flow.window
        self.slot_bytes, size = flow.slot_bytes, flow.ring_bytes
        self._map = None if on_device else mmap.mmap(-1, size)
        self.memory = (
            allocate(size, device) if self._map is None else torch.frombuffer(memoryview(self._map), dtype=torch.uint8)
        )
        self._slots: tuple[torch.Tensor, ...] = tuple(self.memory.split(self.slot_bytes))
        self._pinned = False
        number = (device.index if device.index is not None else registrable_device()) if on_device else None
        self.regions: list[Region] = []
        try:
            for rail in rails:
                self.regions.append(rail.engine.register(Memory(self.memory.data_ptr(), size, number)))
            self._pinned = not on_device and pin(self.memory, device)
        except BaseException:
            self.close()
            raise

    def slot(self, number: int) -> torch.Tensor:
        return self._slots[number % self.window]

    def offset(self, number: int) -> int:
        return number % self.window * self.slot_bytes

    def close(self) -> None:
        for rail, region in zip(self._rails, self.regions, strict=False):  # fewer when one was refused
            rail.engine.deregister(region)
        if self._pinned:
            unpin(self.memory)
        self.memory, self._slots = torch.empty(0, dtype=torch.uint8), ()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a slot that a failed lane still holds goes with that lane
                self._map.close()


class DirectLaneEnd(RingEnd):
    """One end of a lane; slots are used in turn, the same number at both ends."""

    def __init__(
        self,
        ring: Ring,
        transfers: LaneTransfers,
        control: Control,
        key: LaneKey,
        mode: DirectMode,
        *,
        pull: bool,
        stop: int,
    ) -> None:
        super().__init__(key)
        self._ring, self._control, self._mode, self._stop = ring, control, mode, stop
        self._transfers, self._pull = transfers, pull
        self._asked = self._taken = 0  # slots begun here, and slots given out
        self._ready = 0  # slots that came, or that are free again
        self.sent = 0

    def introduce(self, *, lower: bool, timeout: timedelta) -> None:
        """Connect the engines in one order: an end writes a slot that nothing is in yet, the other one waits.

        An engine that breaks when both call each other at once wants the lower rank's call first. One without a thread
        of its own answers calls only here, where the other end waits: it wants both. Raises RuntimeError, EngineFailed.
        """
        end = time.monotonic() + timeout.total_seconds()
        turns = {"none": (), "lower": (lower,), "both": (lower, not lower)}[self._mode.introduce]
        for mine in turns:
            if mine:
                self._transfers.introduce(TRAILER_ROOM, end, lambda: self._control.check(self._stop))
                self._control.tell()
                continue
            while not self._control.heard(1):  # what comes behind it is about slots
                if time.monotonic() > end:
                    raise RuntimeError("timed out")
                self._control.sleep(self._stop, self._serve(max(end - time.monotonic(), 0)))

    def _serve(self, seconds: float) -> float:
        """Do what the other end's transfers need of this one; for how many of so many seconds that will do."""
        return min(seconds, SERVE_SECONDS) if self._transfers.serve() else seconds

    def rail(self, position: Position) -> str:
        port = self._transfers.port
        return f"the {self._mode.label} ring" + (f" over {port}" if port else "")

    def take(self, nbytes: int, number: int) -> torch.Tensor:
        self._taken += 1
        return self._ring.slot(self._taken - 1)

    def post(self, slot: torch.Tensor, length: int, position: Position) -> Posted:
        if self.key.sending:
            self.sent += length
            if self._pull:
                self._control.tell()
            else:
                self._begin(length + TRAILER_BYTES)
        return self

    def _begin(self, nbytes: int) -> None:
        self._transfers.begin(self._ring.offset(self._asked), nbytes)
        self._asked += 1

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the oldest posted slot: to come, or to be free at the other end. Raises RuntimeError."""
        end = time.monotonic() + timeout.total_seconds()
        while not self._ready:
            self._advance()
            if self._ready:
                break
            if not self._transfers:
                self.idle()
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError("timed out")
            if self._transfers:
                time.sleep(POLL_SECONDS)
            else:
                left = self._serve(left)
            self._control.sleep(self._stop, 0 if self._transfers else left)
        self._ready -= 1
        return True

    def _advance(self) -> None:
        """Take in what the other end told, and end transfers that are over, in order."""
        heard = self._control.heard()
        if self._pull and not self.key.sending:
            for _ in range(heard):
                self._begin(self._ring.slot_bytes)
        else:
            self._arrived(heard)
        ended = self._transfers.ended()
        if ended and self.key.sending:
            self._control.tell(ended)
        else:
            self._arrived(ended)

    def _arrived(self, count: int) -> None:
        if count and not self.key.sending and self._mode.flush is not None:
            self._mode.flush()
        self._ready += count

    def _free(self) -> None:
        self._control.tell()

    def advance(self) -> bool:
        if self._transfers:
            self._advance()
        return bool(self._transfers)

    def close(self) -> None:
        """Forget what is under way, deregister, release."""
        self._transfers.drop()
        self._control.close()
        self._ring.close()
