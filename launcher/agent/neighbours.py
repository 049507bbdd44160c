"""Whether hosts of a run still reach each other: agents knock at each other's data address and name who is silent."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Mapping

from hetctl.comm.contract.events import PeerUnreachable

EVERY_S = 3.0
MISSES = 2  # in a row: one lost packet is no partition


class Neighbours:
    """Listens on the data address, and every few seconds knocks at a few peers."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._peers: dict[str, tuple[str, int]] = {}
        self._misses: dict[str, int] = {}
        self._knocking: dict[str, socket.socket] = {}
        self._next = 0.0

    def listen(self, address: str) -> int:
        """Open the port that peers knock at; it is never read from. Returns it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=1024
        )  # all hosts knock at the store's
        self._listener.setblocking(False)
        return int(self._listener.getsockname()[1])

    def watch(self, peers: Mapping[str, tuple[str, int]]) -> None:
        """The peers to knock at: name -> (address, port)."""
        self._peers = dict(peers)
        self._next = time.monotonic() + EVERY_S

    def look(self) -> list[PeerUnreachable]:
        """Answer knocks; when it is time judge the last round and knock again. Events name peers gone silent."""
        self._answer()
        if not self._peers or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + EVERY_S
        events = []
        for name, sock in self._knocking.items():
            self._misses[name] = 0 if _answered(sock) else self._misses.get(name, 0) + 1
            sock.close()
            if self._misses[name] == MISSES:
                events.append(PeerUnreachable(name, self._peers[name][0]))
        self._knocking = {name: _knock(place) for name, place in self._peers.items()}
        return events

    def close(self) -> None:
        for sock in (*self._knocking.values(), *([self._listener] if self._listener else [])):
            sock.close()
        self._listener, self._knocking = None, {}

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while self._listener is not None:
                self._listener.accept()[0].close()


def _knock(place: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.connect_ex(place)
    return sock


def _answered(sock: socket.socket) -> bool:
    """Whether the connection came about, or was refused: a host that refuses is there."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error in (errno.ECONNREFUSED, errno.ECONNRESET):
        return True
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
