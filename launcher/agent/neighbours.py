"""Whether hosts of a run still reach each other: agents knock at each other's data address and name who is silent.

Who knocks proves that it knows the run's secret, without sending it: from where it came its host's ranks may come.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from hetctl.comm.contract.callers import NONCE_BYTES, Doorkeeper, proof
from hetctl.comm.contract.events import PeerUnreachable

EVERY_S = 3.0
MISSES = 2  # in a row: one lost packet is no partition
READS = "neighbours"  # what the selector says of these sockets; who knocks here waits for the next turn


class Neighbours:
    """Listens on the data address, and every few seconds knocks at a few peers. `welcome` is told who has proved it."""

    def __init__(self, selector: selectors.BaseSelector, welcome: Callable[[str], None]) -> None:
        self._selector, self._welcome = selector, welcome
        self._secret = b""
        self._door: Doorkeeper | None = None
        self._peers: dict[str, tuple[str, int]] = {}
        self._misses: dict[str, int] = {}
        self._knocking: dict[str, socket.socket] = {}
        self._heard: set[str] = set()  # those that said anything, or hung up, in this round
        self._next = 0.0

    def listen(self, address: str, secret: str) -> int:
        """Open the port that peers knock at. Returns it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)  # all hosts knock at the store's
        self._secret = secret.encode()
        self._door = Doorkeeper(listener, self._secret)
        return int(listener.getsockname()[1])

    def watch(self, peers: Mapping[str, tuple[str, int]]) -> None:
        """The peers to knock at, from now on: name -> (address, port)."""
        self._peers = dict(peers)

    def look(self) -> list[PeerUnreachable]:
        """Answer knocks; when it is time judge the last round and knock again. Events name peers gone silent."""
        for channel, address in self._door.turn() if self._door else ():
            channel.close()
            self._welcome(address)
        for name, sock in self._knocking.items():
            self._prove(name, sock)
        if not self._peers or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + EVERY_S
        events = []
        for name, sock in self._knocking.items():
            self._misses[name] = 0 if name in self._heard or _answered(sock) else self._misses.get(name, 0) + 1
            self._drop(sock)
            if self._misses[name] == MISSES:
                events.append(PeerUnreachable(name, self._peers[name][0]))
        self._heard.clear()
        sockets = ((name, self._knock(place)) for name, place in self._peers.items())
        self._knocking = {name: sock for name, sock in sockets if sock is not None}
        return events

    def close(self) -> None:
        for sock in self._knocking.values():
            self._drop(sock)
        if self._door is not None:
            self._door.close()
        self._door, self._knocking = None, {}

    def _knock(self, place: tuple[str, int]) -> socket.socket | None:
        """None where this host can open none: that says nothing of the peer."""
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        except OSError:
            return None
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect_ex(place)
        self._selector.register(sock, selectors.EVENT_READ, READS)
        return sock

    def _prove(self, name: str, sock: socket.socket) -> None:
        """Answer what a peer asks; once it has, or hung up, there is no more to hear."""
        if sock not in self._selector.get_map():
            return
        try:
            nonce = sock.recv(NONCE_BYTES)
            self._heard.add(name)
            with contextlib.suppress(OSError):
                sock.send(proof(self._secret, nonce))
        except BlockingIOError:
            return
        except (ConnectionRefusedError, ConnectionResetError):  # a host that refuses is there
            self._heard.add(name)
        except OSError:  # no way there: a router said so, or this host's own port is down
            pass
        self._selector.unregister(sock)

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()


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
