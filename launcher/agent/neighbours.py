"""Whether hosts of a run still reach each other: agents knock at each other's data address and name who is silent.

Who knocks proves that it knows the run's secret, without sending it: where it came from, its host's ranks may come from.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from hetctl.comm.contract.events import PeerUnreachable

EVERY_S = 3.0
MISSES = 2  # in a row: one lost packet is no partition
NONCE_BYTES, PROOF_BYTES = 16, 32
MOST_OF_ONE = 4  # callers from one address that may be about to prove themselves: strangers crowd out one another
MOST_AT_ONCE = 256  # taken from the queue in one turn
READS = "neighbours"  # what the selector says of these sockets; new callers wake nobody, and wait for the next turn


class Neighbours:
    """Listens on the data address, and every few seconds knocks at a few peers. `welcome` is told who has proved it."""

    def __init__(self, selector: selectors.BaseSelector, welcome: Callable[[str], None]) -> None:
        self._selector, self._welcome = selector, welcome
        self._secret = b""
        self._listener: socket.socket | None = None
        self._peers: dict[str, tuple[str, int]] = {}
        self._misses: dict[str, int] = {}
        self._knocking: dict[str, socket.socket] = {}
        self._heard: set[str] = set()  # those that said anything, or hung up, in this round
        self._callers: dict[socket.socket, tuple[str, bytes, float]] = {}  # address, nonce, until when
        self._next = 0.0

    def listen(self, address: str, secret: str) -> int:
        """Open the port that peers knock at. Returns it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=1024
        )  # all hosts knock at the store's
        self._listener.setblocking(False)
        self._secret = secret.encode()
        return int(self._listener.getsockname()[1])

    def watch(self, peers: Mapping[str, tuple[str, int]]) -> None:
        """The peers to knock at, from now on: name -> (address, port)."""
        self._peers = dict(peers)

    def look(self) -> list[PeerUnreachable]:
        """Answer knocks; when it is time judge the last round and knock again. Events name peers gone silent."""
        self._take_callers()
        self._hear_callers()
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
        self._knocking = {name: self._knock(place) for name, place in self._peers.items()}
        return events

    def close(self) -> None:
        for sock in (*self._callers, *self._knocking.values(), *([self._listener] if self._listener else [])):
            self._drop(sock)
        self._listener, self._knocking, self._callers = None, {}, {}

    def _take_callers(self) -> None:
        """Give each new caller a number to prove itself by, which nobody was given before."""
        with contextlib.suppress(OSError):
            for _ in range(MOST_AT_ONCE if self._listener is not None else 0):
                sock, (address, *_) = self._listener.accept()  # type: ignore[union-attr]
                of_one = [known for known, about in self._callers.items() if about[0] == address]
                if len(of_one) >= MOST_OF_ONE:  # the oldest: one of the run's proves itself at once
                    self._forget(of_one[0])
                sock.setblocking(False)
                nonce = secrets.token_bytes(NONCE_BYTES)
                self._callers[sock] = (address, nonce, time.monotonic() + EVERY_S)
                self._selector.register(sock, selectors.EVENT_READ, READS)
                with contextlib.suppress(OSError):  # it is gone, as will be heard
                    sock.send(nonce)

    def _hear_callers(self) -> None:
        for sock, (address, nonce, until) in list(self._callers.items()):
            said = _received(sock, PROOF_BYTES)
            if said is None and time.monotonic() < until:
                continue
            if said is not None and hmac.compare_digest(said, _proof(self._secret, nonce)):
                self._welcome(address)
            self._forget(sock)

    def _forget(self, caller: socket.socket) -> None:
        del self._callers[caller]
        self._drop(caller)

    def _knock(self, place: tuple[str, int]) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect_ex(place)
        self._selector.register(sock, selectors.EVENT_READ, READS)
        return sock

    def _prove(self, name: str, sock: socket.socket) -> None:
        """Answer what a peer asks; once it has, or hung up, there is no more to hear."""
        if name not in self._heard and (nonce := _received(sock, NONCE_BYTES)) is not None:
            self._heard.add(name)
            self._selector.unregister(sock)
            with contextlib.suppress(OSError):
                sock.send(_proof(self._secret, nonce))

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def _received(sock: socket.socket, count: int) -> bytes | None:
    """What came, up to so many bytes; None as long as nothing has. Whoever says it in pieces is none of ours."""
    try:
        return sock.recv(count)
    except BlockingIOError:
        return None
    except OSError:
        return b""


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
