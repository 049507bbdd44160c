"""A group's bridge: messages between this rank and ranks of other islands, whichever transport carries them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from hetctl.comm.bridge.staging import Combine, flat_bytes
from hetctl.comm.contract.natives import HOST
from hetctl.comm.operation.device import module_of
from hetctl.comm.operation.store_connections import GroupStore
from hetctl.comm.operation.work import BridgeError, HetWork, OperationDeadline, ended_by

P2P, COLLECTIVE = 0, 1  # the program's own messages, and those that collectives are made of, never meet
MOST_TAG = 2**29 - 1  # of a program's message: gloo's tags are 32-bit with a sign, and two bits are taken
UNTAKEN_SECONDS = 10.0  # of messages that the program has not waited for, when it destroys their group
LOOK_SECONDS = 0.002  # between looks at lanes that still send then


class Outgoing:
    """How far a message that is sent has been copied out: whoever writes into the same memory comes behind it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: list[tuple[int, Any]] = []  # (bytes copied, the event behind which they are)
        self._past = -1  # of the last one
        self._over = False

    def add(self, past: int, event: Any) -> None:
        """The copy of everything up to byte `past` has been started and is over behind `event`."""
        with self._changed:
            self._copies.append((past, event))
            self._past = past
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will be copied: the message has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def behind(self, past: int, seconds: float) -> Any:
        """The event behind which what lies before byte `past` may be written over. Raises BridgeError if none comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over or self._past >= past, seconds):
                raise BridgeError("the outgoing copy of the same memory did not end")
            return next((event for copied, event in self._copies if copied >= past), None)


@dataclass(eq=False)
class Message:
    """One tensor on its way: flat, contiguous; `ready` is the event after which it may be read or written."""

    data: torch.Tensor
    work: HetWork
    deadline: OperationDeadline
    ready: Any = None
    combine: Combine | None = None
    after: Message | None = None  # a send of the same memory: what lands here must be copied out there before
    outgoing: Outgoing | None = None  # of a collective's send

    @functools.cached_property
    def octets(self) -> torch.Tensor:
        """The tensor's memory as flat bytes."""
        return flat_bytes(self.data)


@dataclass(frozen=True)
class LaneKey:
    """One ordered stream of messages: direction, peer, and what tells streams of one pair apart.

    Host and device tensors have streams of their own, but between ranks of unlike device types, where what one end has
    on its device the other one has on the host: there one stream carries all, and `device` is this end's.
    """

    sending: bool
    peer: int
    tag: int
    kind: int
    device: torch.device
    unlike: bool = False

    @property
    def on_device(self) -> bool:
        """Whether both ends' tensors are on devices."""
        return not self.unlike and self.device.type != HOST

    @property
    def wire_tag(self) -> int:
        return self.tag << 2 | self.kind << 1 | self.on_device

    def link_name(self, rank: int) -> str:
        return f"{rank}-{self.peer}" if self.sending else f"{self.peer}-{rank}"


class Lane(Protocol):
    """What carries the messages of one stream, in order."""

    @property
    def moved(self) -> float:
        """When anything last did, in monotonic seconds."""

    @property
    def busy(self) -> bool:
        """Whether it has anything left to do."""

    def put(self, message: Message) -> None: ...

    def rest(self, *, seconds: float) -> None: ...

    def close(self, *, seconds: float) -> None: ...


class Transport(Protocol):
    """How lanes to some peers are made, and how all of them are broken."""

    def lane(self, bridge: Bridge, key: LaneKey) -> Lane: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Bridge:
    """Point-to-point between this rank and ranks of other islands, for one process group."""

    def __init__(
        self,
        rank: int,
        store: GroupStore,
        *,
        timeout: timedelta,
        verify: bool,
        who: Callable[[int], str],
        transport_to: Callable[[LaneKey], Transport],
        shared_by: Callable[[int], torch.device | None],
        on_error: Callable[[str], None],
    ) -> None:
        self.rank, self.store, self.timeout = rank, store, timeout
        self.verify, self.who, self.on_error = verify, who, on_error
        self._transport_to = transport_to
        self._shared_by = functools.cache(shared_by)  # where a peer computes on another device type: this rank's device
        self._lock = threading.Lock()
        self._lanes: dict[LaneKey, Lane] = {}
        self._transports: dict[int, Transport] = {}  # by identity: few, and shared by peers
        self._open: dict[int, Message] = {}
        self.error: BaseException | None = None

    def send(
        self, data: torch.Tensor, peer: int, *, tag: int, kind: int, work: HetWork, deadline: OperationDeadline
    ) -> Message:
        """Queue the sending of a flat contiguous tensor; its work ends when the memory may be written again."""
        outgoing = Outgoing() if kind == COLLECTIVE else None  # what else is sent, nothing lands in before it has left
        message = Message(data, work, deadline, ready=_event(data), outgoing=outgoing)
        return self._put(self._key(True, peer, tag, kind, data), message)

    def recv(
        self,
        data: torch.Tensor,
        peer: int,
        *,
        tag: int,
        kind: int,
        work: HetWork,
        deadline: OperationDeadline,
        combine: Combine | None = None,
        after: Message | None = None,
    ) -> Message:
        """Queue the receiving of a flat contiguous tensor, copied in or combined with what is there."""
        message = Message(data, work, deadline, ready=_event(data), combine=combine, after=after)
        return self._put(self._key(False, peer, tag, kind, data), message)

    def _key(self, sending: bool, peer: int, tag: int, kind: int, data: torch.Tensor) -> LaneKey:
        shared = self._shared_by(peer)
        if shared is None:
            return LaneKey(sending, peer, tag, kind, data.device)
        if not data.is_cpu and data.device != shared:
            raise BridgeError(f"a tensor on {data.device} for {self.who(peer)}, but this rank computes on {shared}")
        return LaneKey(sending, peer, tag, kind, shared, unlike=True)

    def _put(self, key: LaneKey, message: Message) -> Message:
        transport = None if key in self._lanes else self._transport_to(key)  # it may have to ask the peer
        with self._lock:
            if (error := ended_by(message.work.what, self.error)) is not None:
                raise error
            lane = self._lanes.get(key)
            if lane is None:
                transport = transport or self._transport_to(key)
                self._transports[id(transport)] = transport
                lane = self._lanes[key] = transport.lane(self, key)
            self._open[id(message)] = message
        lane.put(message)
        return message

    def end(self, message: Message, *, ready: Any = None, error: BaseException | None = None) -> None:
        """A message has ended; whoever waits for it, or for its outgoing copy, goes on."""
        with self._lock:
            self._open.pop(id(message), None)
        message.work.finish(ready=ready, error=error)
        if message.outgoing is not None:
            message.outgoing.end()

    def fail(self, error: BaseException) -> None:
        """End every pending message with `error`, and the connections, so that their other ends see it too."""
        with self._lock:
            self.error = self.error or error
            pending, transports = list(self._open.values()), list(self._transports.values())
        for message in pending:
            self.end(message, error=self.error)
        for transport in transports:
            transport.kill()

    def close(self, *, seconds: float) -> None:
        """Send what is queued, unless nobody takes it for a while, then end lanes and connections."""
        if self.error is None and not self._all_end(seconds):
            self.fail(BridgeError("the process group was destroyed"))
        with self._lock:
            lanes, transports = list(self._lanes.values()), list(self._transports.values())
            self._lanes, self._transports = {}, {}
        for lane in lanes:
            lane.close(seconds=min(seconds, 1.0) if self.error is not None else seconds)
        with self._lock:
            self.error = self.error or BridgeError("the process group was destroyed")
        for transport in transports:
            transport.close()

    def rest(self, *, seconds: float) -> None:
        """Wait until the threads of lanes hold no message any more."""
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.rest(seconds=seconds)

    def sent(self, seconds: float) -> bool:
        """Whether nothing is under way: what has ended for the program may still be on its way out, for a while."""
        with self._lock:
            pending = bool(self._open)
        return not pending and self._all_end(seconds)

    def _all_end(self, seconds: float) -> bool:
        """Whether the pending messages end, and lanes have seen them off, in this time, while anything moves."""
        with self._lock:
            pending, lanes, deadline = list(self._open.values()), list(self._lanes.values()), OperationDeadline(seconds)
        began = time.monotonic()
        for message in pending:
            ended = threading.Event()
            message.work.on_end(ended.set)
            while not ended.wait(min(UNTAKEN_SECONDS, deadline.left())):
                if deadline.passed() or self._stands_still(began):
                    return False
        while any(lane.busy for lane in lanes):  # a message has ended where a device has copied it out
            if deadline.passed() or self._stands_still(began) or self.error is not None:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _stands_still(self, since: float) -> bool:
        """Whether nobody has taken or sent anything for a while, from `since` on."""
        with self._lock:
            return all(time.monotonic() - max(lane.moved, since) > UNTAKEN_SECONDS for lane in self._lanes.values())


def _event(data: torch.Tensor) -> Any:
    return None if data.is_cpu else module_of(data.device).current_stream(data.device).record_event()
