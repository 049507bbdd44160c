"""Bytes between a tensor and the host slots that a network can read: trailers, and one copy engine per device type."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetctl.comm.bridge.device_memory import await_stream, start_copy
from hetctl.comm.bridge.failover import Position
from hetctl.comm.contract.errors import BridgeError
from hetctl.comm.contract.units import MiB
from hetctl.comm.operation.device import has_streams, module_of
from hetctl.comm.operation.recorder import METER

CHUNK_BYTES = 4 * MiB  # what a share of a large collective is made of, and a message over rails
TRAILERS_AHEAD = 16  # on their way to device slots behind their chunks: more than a lane has slots
COMBINES_AHEAD = 8  # chunks on the device that are not yet combined: bounds what they take there
_TRAILER = struct.Struct("<QIIQ")  # operation, chunk, checksum (0: none), length
TRAILER_BYTES = _TRAILER.size
Span = tuple[int, int]  # bytes [first, past) of a message
Combine = Callable[[torch.Tensor, torch.Tensor], object]  # (target in place, incoming)


class TrailerMismatch(BridgeError):
    """A slot held another chunk than the one expected, or other bytes than were sent."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat uint8 view, detached from autograd."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def trailer_of(position: Position, length: int, *, checksum: int = 0) -> bytes:
    """The trailer of a chunk; 0: without a checksum."""
    return _TRAILER.pack(*position, checksum, length)


def seal(slot: torch.Tensor, position: Position, length: int, *, checked: bool) -> None:
    """Write the trailer behind `length` payload bytes of `slot`, on the host or on a device."""
    trailer = trailer_of(position, length, checksum=_checksum(slot[:length]) if checked else 0)
    if not slot.is_cpu:
        _scratch(slot.device).write(slot.data_ptr() + length, trailer)
    else:
        assert length + TRAILER_BYTES <= slot.numel(), "a slot too small for its trailer"
        ctypes.memmove(slot.data_ptr() + length, trailer, TRAILER_BYTES)


def unseal(slot: torch.Tensor, position: Position, length: int, *, checked: bool) -> None:
    """Raises TrailerMismatch unless the first `length` bytes of a received slot are exactly the expected chunk."""
    if not slot.is_cpu:
        trailer = _scratch(slot.device).read(slot.data_ptr() + length)
    else:
        assert length + TRAILER_BYTES <= slot.numel(), "a slot too small for its trailer"
        trailer = ctypes.string_at(slot.data_ptr() + length, TRAILER_BYTES)
    operation, chunk, checksum, found_length = _TRAILER.unpack(trailer)
    if (operation, chunk) != position or found_length != length:
        raise TrailerMismatch(
            f"expected chunk {position[1]} of message {position[0]} with {length} bytes, "
            f"found chunk {chunk} of message {operation} with {found_length} bytes"
        )
    if checked and checksum != _checksum(slot[:length]):
        raise TrailerMismatch(f"chunk {chunk} of message {operation} arrived with other bytes than were sent")


def _checksum(payload: torch.Tensor) -> int:
    return zlib.crc32(_on_host(payload)) or 1


def _on_host(data: torch.Tensor) -> Any:
    """The bytes as a buffer: the memory itself, or a copy of device memory.

    The copy is pinned: one to pageable memory holds a lock of the driver that other threads' copies wait for.
    """
    if data.is_cpu:
        return data.numpy()
    host = _pinned(data.numel())
    stream = _shared_stream(data.device)
    with module_of(data.device).stream(stream):
        host.copy_(data, non_blocking=True)
        stream.synchronize()
    return host.numpy()


def _pinned(nbytes: int) -> torch.Tensor:
    """Fresh host memory that devices copy to and from on their own."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Scratch:
    """Pinned room for one trailer, and the stream to copy it by: the program's must not be waited for.

    One stream for all: PyTorch hands out 32 in turn, and a lane's thread that comes and goes would soon share a
    stream with copies that wait for the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _shared_stream(device)
        self._host = _pinned(TRAILER_BYTES)
        buffer: Any = self._host.numpy()
        self._bytes, self._address = memoryview(buffer), self._host.data_ptr()

    def write(self, target: int, trailer: bytes) -> None:
        self._bytes[:] = trailer
        self._copy(target, self._address)

    def read(self, source: int) -> bytes:
        self._copy(self._address, source)
        return bytes(self._bytes)

    def _copy(self, target: int, source: int) -> None:
        start_copy(target, source, TRAILER_BYTES, self._stream)
        await_stream(self._stream)


class _Trailers:
    """Pinned room for the trailers that a lane's copies still read, in turn: it has fewer slots than there is room."""

    def __init__(self) -> None:
        self._host = _pinned(TRAILERS_AHEAD * TRAILER_BYTES)
        buffer: Any = self._host.numpy()
        self._bytes, self._address, self._count = memoryview(buffer), self._host.data_ptr(), 0

    def hold(self, trailer: bytes) -> int:
        """The address where a trailer stays until `TRAILERS_AHEAD` more have come."""
        at = self._count % TRAILERS_AHEAD * TRAILER_BYTES
        self._count += 1
        self._bytes[at : at + TRAILER_BYTES] = trailer
        return self._address + at


_OF_THREAD = threading.local()


def _scratch(device: torch.device) -> _Scratch:
    """The calling thread's own: a lane works on one chunk at a time."""
    held: dict[torch.device, _Scratch] = _OF_THREAD.__dict__.setdefault("held", {})
    if device not in held:
        held[device] = _Scratch(device)
    return held[device]


def side_stream(device: torch.device) -> Any:
    """A new stream for the bridge's own kernels: each is short and the next stage waits for it, so that they may not
    queue behind the program's products, which fill the device."""
    return module_of(device).Stream(device, priority=-1)


_shared_stream = functools.cache(side_stream)


@dataclass(frozen=True)
class Landed:
    """A chunk that was taken in: the events behind which its slot is read, and its target written; None on the host."""

    read: Any = None
    done: Any = None


class Source(Protocol):
    """A message's tensor, flat and contiguous, and the same as bytes, which are made where somebody asks for them."""

    data: torch.Tensor

    @property
    def octets(self) -> torch.Tensor: ...


def engine_for(device: torch.device) -> CopyEngine:
    """A copy engine with streams of its own: one lane's copies must not queue behind another's that wait."""
    return StreamEngine(device) if has_streams(device) else CopyEngine()


class CopyEngine:
    """How bytes of one device type enter and leave slots.

    As it stands here on the host: a slot is fresh memory, and a copy is over when the call returns.
    """

    def take(self, nbytes: int) -> torch.Tensor:
        """A host slot for `nbytes` of payload and the trailer."""
        return torch.empty(nbytes + TRAILER_BYTES, dtype=torch.uint8, device="cpu")

    def give(self, slot: torch.Tensor, event: Any) -> None:
        """Hand back a slot; the device still reads it until `event`, where there is one."""

    def enter(self) -> None:
        """Get the calling thread ready for copies; they are only made by threads that did so."""

    def out(self, source: Source, span: Span, slot: torch.Tensor, ready: Any, trailer: bytes = b"") -> Any:
        """Start copying these bytes into a slot, after the event `ready`, which a message's first chunk brings.

        Returns the event behind which the copy is over; None on the host.
        A device slot gets its `trailer` by the same copy; elsewhere, and with a checksum in it, it is `seal`ed later.
        """
        first, past = span
        slot[: past - first].copy_(source.octets[first:past])
        METER.touch(2 * (past - first))
        return None

    def into(
        self, slot: torch.Tensor, target: torch.Tensor, span: Span, combine: Combine | None, ready: Sequence[Any]
    ) -> Landed:
        """Copy or combine a slot's payload into these bytes of a flat tensor, behind the events `ready`."""
        payload, target = _typed(slot, target, span)
        if combine is None:
            target.copy_(payload)
        else:
            combine(target, payload)
        METER.touch((2 if combine is None else 3) * (span[1] - span[0]))  # a sum reads its target too
        return Landed()


class StreamEngine(CopyEngine):
    """Device tensors: pinned slots and side streams, so that copies never touch the program's stream.

    A lane's thread keeps the stream of its copies as its current one: switching to and fro for each chunk took longer
    than the rest of starting a copy. Combining has a stream of its own. Its kernels wait until the program's product
    lets go of the device, which may take milliseconds, and the copies behind them must not wait as well: while
    products ran, chunks of 8 MiB moved at 5 GB/s, one for each product, and 17 without any.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._streams = device, module_of(device)
        self._copies: Any = None
        self._combines: Any = None
        self._trailers: _Trailers | None = None
        self._combining: deque[Any] = deque()
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._busy: list[tuple[Any, torch.Tensor]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        size = _size_class(nbytes)
        with self._lock:
            self._collect()
            free = self._free.setdefault(size, [])
            if free:
                return free.pop()
        return _pinned(size)

    def give(self, slot: torch.Tensor, event: Any) -> None:
        with self._lock:
            if event is None:
                self._free.setdefault(slot.numel(), []).append(slot)
            else:
                self._busy.append((event, slot))

    def _collect(self) -> None:
        waiting, self._busy = self._busy, []
        for event, slot in waiting:
            if event.query():
                self._free.setdefault(slot.numel(), []).append(slot)
            else:
                self._busy.append((event, slot))

    def enter(self) -> None:
        self._streams.set_device(self.device)
        self._copies = self._copies or side_stream(self.device)
        self._streams.set_stream(self._copies)

    def out(self, source: Source, span: Span, slot: torch.Tensor, ready: Any, trailer: bytes = b"") -> Any:
        if source.data.is_cpu:  # to a rank that computes on another device type one lane carries both
            return super().out(source, span, slot, ready, trailer)
        first, past = span
        size = past - first
        if ready is not None:
            self._copies.wait_event(ready)
            source.data.record_stream(self._copies)
        if not slot.is_cpu:
            stream, to = self._copies, slot.data_ptr()
            start_copy(to, source.data.data_ptr() + first, size, stream)
            if trailer:
                self._trailers = self._trailers or _Trailers()
                start_copy(to + size, self._trailers.hold(trailer), TRAILER_BYTES, stream)
        else:
            slot[:size].copy_(source.octets[first:past], non_blocking=True)
            METER.touch(size)
        return self._copies.record_event()

    def into(
        self, slot: torch.Tensor, target: torch.Tensor, span: Span, combine: Combine | None, ready: Sequence[Any]
    ) -> Landed:
        if target.is_cpu:
            return super().into(slot, target, span, combine, ready)
        first, past = span
        if combine is None and not slot.is_cpu:
            self._follow(self._copies, target, ready)
            start_copy(target.data_ptr() + first, slot.data_ptr(), past - first, self._copies)
        else:
            if slot.is_cpu:
                METER.touch(past - first)
            payload, target = _typed(slot, target, span)
            if combine is not None and slot.is_cpu:
                return self._combine(payload, target, combine, ready)
            self._follow(self._copies, target, ready)
            if combine is not None:
                combine(target, payload)
            else:
                target.copy_(payload, non_blocking=True)
        done = self._copies.record_event()
        return Landed(done, done)

    def _combine(self, payload: torch.Tensor, target: torch.Tensor, combine: Combine, ready: Sequence[Any]) -> Landed:
        """Copy to the device at once, combine as soon as the device lets us: the slot is free in between."""
        stream = self._combines = self._combines or side_stream(self.device)
        incoming = payload.to(self.device, non_blocking=True)
        read = self._copies.record_event()
        incoming.record_stream(stream)
        self._follow(stream, target, [*ready, read])
        self._streams.set_stream(stream)
        combine(target, incoming)
        self._streams.set_stream(self._copies)
        done = stream.record_event()
        self._combining.append(done)
        if len(self._combining) > COMBINES_AHEAD:
            self._combining.popleft().synchronize()  # the host waits: what it has asked for takes memory already
        return Landed(read, done)

    @staticmethod
    def _follow(stream: Any, target: torch.Tensor, ready: Sequence[Any]) -> None:
        """What comes next on a stream writes `target` behind these events."""
        for before in ready:
            if before is not None:
                stream.wait_event(before)
        if ready:
            target.record_stream(stream)


def _typed(slot: torch.Tensor, target: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot's payload, and these bytes of a flat tensor, as elements of that tensor."""
    (first, past), size = span, target.element_size()
    return slot[: past - first].view(target.dtype), target[first // size : past // size]


def _size_class(nbytes: int) -> int:
    """Sizes that slots are kept in, trailer included: powers of two, as pinned memory is handed out anyway."""
    return 1 << (nbytes + TRAILER_BYTES - 1).bit_length()
