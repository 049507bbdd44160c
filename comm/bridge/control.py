"""The control connection beside a ring of registered memory: who is there, which slots are filled, which are free.

A plain socket: the bytes of tensors never take it. It notices at once when the other process is gone, whichever engine
moves the data, and lets a lane sleep instead of spinning on memory.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

from hetctl.comm.bridge.connecting import HANDSHAKE_SECONDS, ConnectWait, own_address
from hetctl.comm.operation.c10d import Store

_MOST_BYTES = 1 << 20  # of a descriptor: NIXL's grows with the regions of a process
MOST_SECONDS = 3600.0  # at once: poll takes no more than 24 days
_GREETING = struct.Struct("<I")


def offer(
    store: Store, name: str, about: Mapping[str, Any], connect_wait: ConnectWait
) -> tuple[Control, dict[str, Any]]:
    """Wait for the other end to come; what it says of itself. Only who read the token in the store gets in."""
    token = secrets.token_hex(16)
    address = own_address()
    with socket.create_server((address, 0), backlog=4) as listener:
        store.set(name, json.dumps([address, listener.getsockname()[1], token]))
        while True:
            channel = connect_wait.accept(listener)
            said = _hear(channel)
            if hmac.compare_digest(str(said.get("token", "")), token):
                break
            channel.close()
    _say(channel, about)
    return Control(channel), said


def accept(
    store: Store, name: str, about: Mapping[str, Any], connect_wait: ConnectWait
) -> tuple[Control, dict[str, Any]]:
    """Call the end that offers; what it says of itself."""
    address, port, token = json.loads(connect_wait.value_of(store, name))
    channel = socket.create_connection((address, port), 2 * HANDSHAKE_SECONDS)  # it may be talking to somebody else
    _say(channel, {**about, "token": token})
    said = _hear(channel)
    if not said:
        raise RuntimeError("the other process closed the bridge's control connection")
    return Control(channel), said


class Control:
    """One end of a connection; a byte each way is one slot: filled (from the sender) or free (from the receiver)."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setblocking(False)
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._stop = -1  # what is polled as well

    def tell(self, count: int = 1) -> None:
        """Tell the other end of `count` slots. Raises RuntimeError when it is gone."""
        try:
            self._channel.send(b"." * count)  # at most a window of bytes is ever under way: they always fit
        except OSError as error:
            raise RuntimeError(f"the other process is gone: {error.strerror}") from None

    def heard(self, most: int = 4096) -> int:
        """How many slots the other end told of since, `most` at once. Raises RuntimeError when it is gone."""
        return self._read(most)

    def check(self, stop: int) -> None:
        """Raise RuntimeError when `stop` is raised, or the other end is gone; what it has said stays to be heard."""
        self.sleep(stop, 0)
        self._read(1, socket.MSG_PEEK)

    def _read(self, most: int, flags: int = 0) -> int:
        try:
            said = self._channel.recv(most, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"the other process is gone: {error.strerror}") from None
        if not said:
            raise RuntimeError("the other process is gone: its end of the bridge was closed")
        return len(said)

    def sleep(self, stop: int, seconds: float) -> None:
        """Until the other end says something, `stop` is raised, or the time is over (or an hour: ask again)."""
        if stop != self._stop:
            self._poll.register(stop, select.POLLIN)
            self._stop = stop
        if any(fd == stop for fd, _ in self._poll.poll(min(seconds, MOST_SECONDS) * 1000)):
            raise RuntimeError("the connection was closed")

    def close(self) -> None:
        self._channel.close()


def _say(channel: socket.socket, about: Mapping[str, Any]) -> None:
    text = json.dumps(about).encode("ascii")
    channel.sendall(_GREETING.pack(len(text)) + text)


def _hear(channel: socket.socket) -> dict[str, Any]:
    """What the other end says first; nothing when it is not what a bridge says."""
    try:
        (length,) = _GREETING.unpack(_exactly(channel, _GREETING.size))
        said = json.loads(_exactly(channel, length)) if length <= _MOST_BYTES else {}
    except (OSError, ValueError, struct.error):
        return {}
    return said if isinstance(said, dict) else {}


def _exactly(channel: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = channel.recv(count - len(found))
        if not part:
            raise OSError("closed")
        found += part
    return found
