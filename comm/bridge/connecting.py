"""How a lane meets its other end: where this one is reached, waiting in turns until a deadline or an end, and the
control connection beside a ring of registered memory, which says who is there, which slots are filled, which free."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetctl.comm.contract.callers import NONCE_BYTES, Doorkeeper, proof
from hetctl.comm.operation.work import OperationDeadline, Store

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.25  # between looks: an eighth of the time that has passed
_SIOCGIFADDR = 0x8915
HANDSHAKE_SECONDS = 30.0  # for an end that has come to say what it is


class ConnectWait:
    """Lasts until `over` says why not: a receive from any source may wait for ever, and must not fail its group."""

    def __init__(self, over: Callable[[], str | None]) -> None:
        self._over = over

    def within(self, deadline: OperationDeadline) -> ConnectWait:
        """One that ends with a deadline too."""
        return ConnectWait(lambda: self._over() or ("timed out" if deadline.passed() else None))

    def check(self) -> None:
        """Raises RuntimeError when there is nothing to wait for any more."""
        why = self._over()
        if why is not None:
            raise RuntimeError(why)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each next look; raises RuntimeError when there is nothing to wait for."""
        began = time.monotonic()
        while True:
            self.check()
            yield min(max((time.monotonic() - began) / 8, FIRST_PAUSE_SECONDS), LAST_PAUSE_SECONDS)

    def value_of(self, store: Store, key: str) -> bytes:
        """What the other end says in the store. (A store's own wait complains on stderr when it times out.)"""
        pauses = self.pauses()
        while not store.check([key]):
            time.sleep(next(pauses))
        value: bytes = store.get(key)
        return value

    def accept(self, listener: socket.socket) -> socket.socket:
        """Who comes next to a listening socket, given a while to talk."""
        for pause in self.pauses():
            listener.settimeout(pause)
            with contextlib.suppress(TimeoutError):
                channel, _ = listener.accept()
                channel.settimeout(HANDSHAKE_SECONDS)
                return channel
        raise AssertionError("pauses never end")

    @contextlib.contextmanager
    def holding(self, lock: Any) -> Iterator[None]:
        """Hold a lock that another lane may keep while it waits for the same peer."""
        pauses = self.pauses()
        while not lock.acquire(timeout=next(pauses)):
            pass
        try:
            yield
        finally:
            lock.release()


def own_address() -> str:
    """The address that peers reach this process at: that of the first interface named for gloo, else loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return address_of(name) if name else "127.0.0.1"


def address_of(interface: str) -> str:
    """An interface's first IPv4 address. Raises OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        found = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


_MOST_BYTES = 1 << 20  # of a descriptor: NIXL's grows with the regions of a process
MOST_SECONDS = 3600.0  # at once: poll takes no more than 24 days
_GREETING = struct.Struct("<I")


def offer(
    store: Store, name: str, about: Mapping[str, Any], connect_wait: ConnectWait
) -> tuple[Control, dict[str, Any]]:
    """Wait for the other end to come; what it says of itself. Only who read the secret in the store gets in."""
    secret, address = secrets.token_bytes(32), own_address()
    with socket.create_server((address, 0), backlog=64) as listener:
        store.set(name, json.dumps([address, listener.getsockname()[1], secret.hex()]))
        channel = _caller(listener, secret, connect_wait)
    channel.settimeout(HANDSHAKE_SECONDS)
    said = _hear(channel)
    _say(channel, about)
    return Control(channel), said


def accept(
    store: Store, name: str, about: Mapping[str, Any], connect_wait: ConnectWait
) -> tuple[Control, dict[str, Any]]:
    """Call the end that offers; what it says of itself."""
    address, port, secret = json.loads(connect_wait.value_of(store, name))
    channel = socket.create_connection((address, port), HANDSHAKE_SECONDS)
    channel.sendall(proof(bytes.fromhex(secret), _exactly(channel, NONCE_BYTES)))
    _say(channel, about)
    said = _hear(channel)
    if not said:
        raise RuntimeError("the other process closed the bridge's control connection")
    return Control(channel), said


def _caller(listener: socket.socket, secret: bytes, connect_wait: ConnectWait) -> socket.socket:
    """The first caller that knows the secret."""
    with contextlib.closing(Doorkeeper(listener, secret)) as door:
        for pause in connect_wait.pauses():
            door.wait(pause)
            for channel, _ in door.turn():
                return channel
    raise AssertionError("pauses never end")


class Control:
    """One end of a control connection; a byte each way is one slot: filled (by the sender) or free (by the receiver).

    A plain socket: the bytes of tensors never take it. It notices at once when the other process is gone, whichever
    engine moves the data, and lets a lane sleep instead of spinning on memory.
    """

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

    def check(self, stop: int) -> None:
        """Raise RuntimeError when `stop` is raised, or the other end is gone; what it has said stays to be heard."""
        self.sleep(stop, 0)
        self.heard(1, socket.MSG_PEEK)

    def heard(self, most: int = 4096, flags: int = 0) -> int:
        """How many slots the other end told of since, `most` at once. Raises RuntimeError when it is gone."""
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
