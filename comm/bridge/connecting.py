"""How a lane meets its other end: where this one is reached, and waiting in turns until a deadline or an end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetctl.comm.operation.c10d import Store
from hetctl.comm.operation.work import OperationDeadline

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
    if not name:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        found = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(found[20:24])
