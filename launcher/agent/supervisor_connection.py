"""The agent's line to its supervisor: numbered events out, commands in, and a socket to come back to when it is lost.

Standard library only. No write blocks: a supervisor that is stopped or cut off must not keep the agent from its lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections import deque
from typing import Any

MAX_KEPT = 8 << 20  # bytes of events that nobody confirmed yet; the oldest logs and figures go first
MAX_UNSENT = 1 << 20  # bytes that wait for a slow line; the rest waits in the kept events
ESSENTIAL = ("ready", "exit", "done", "unreachable")


class SupervisorConnection:
    """Commands from stdin and events to stdout, or both over a connection made to `path` later."""

    def __init__(self, selector: selectors.BaseSelector, stdin: int, stdout: int) -> None:
        self.selector = selector
        self.path = ""
        self._in: int | None = stdin
        self._out: int | None = stdout
        self._connection: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._received = b""
        self._unsent = bytearray()
        self._kept: deque[tuple[int, str, bytes]] = deque()
        self._kept_bytes = 0
        self._waiting: deque[tuple[int, str, bytes]] = deque()  # those of the kept ones that were not sent yet
        self._number = 0
        for fd in (stdin, stdout):
            os.set_blocking(fd, False)
        selector.register(stdin, selectors.EVENT_READ, "commands")

    def confirmed(self, number: int) -> bool:
        """Whether the event of that number, and all before it, were heard."""
        return not self._kept or self._kept[0][0] > number

    def unheard(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind that nobody has confirmed."""
        return [json.loads(line) for _, event, line in self._kept if event == kind]

    @property
    def connected(self) -> bool:
        """Whether somebody listens."""
        return self._in is not None

    def listen(self, path: str) -> None:
        """Let a supervisor that lost the line come back at this unix socket."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(4)
        self.path = path
        self.selector.register(self._listener, selectors.EVENT_READ, "visitor")

    def accept(self) -> bool:
        """Somebody came back: the old line is dropped, everything unconfirmed is said again. False: they are gone."""
        assert self._listener is not None
        try:
            visitor, _ = self._listener.accept()
        except OSError:
            return False
        self._drop()
        visitor.setblocking(False)
        self._connection, self._in, self._out = visitor, visitor.fileno(), visitor.fileno()
        self._received, self._unsent = b"", bytearray(b'{"event": "attached"}\n')
        self._waiting = deque(self._kept)
        self.selector.register(visitor.fileno(), selectors.EVENT_READ, "commands")
        self.flush()
        return True

    def tell(self, **event: Any) -> int:
        """Say something; it is kept until it is confirmed. Returns its number."""
        self._number += 1
        line = json.dumps({**event, "n": self._number}).encode() + b"\n"
        self._kept.append((self._number, event["event"], line))
        self._waiting.append(self._kept[-1])
        self._kept_bytes += len(line)
        if self._kept_bytes > MAX_KEPT:
            self._forget()
        self.flush()
        return self._number

    def flush(self) -> None:
        """Send what the line takes now."""
        if self._out is None:
            return
        while self._waiting and len(self._unsent) < MAX_UNSENT:
            self._unsent += self._waiting.popleft()[2]
        try:
            while self._unsent:
                del self._unsent[: os.write(self._out, self._unsent[:65536])]
        except BlockingIOError:
            return
        except OSError:
            self._drop()

    def commands(self) -> list[dict[str, Any]]:
        """What the supervisor sent. At end-of-file the line is lost: `connected` says so."""
        if self._in is None:
            return []
        try:
            data = os.read(self._in, 1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop()
            return []
        *lines, self._received = (self._received + data).split(b"\n")
        found = [json.loads(line) for line in lines if line.strip()]
        for command in found:
            self._confirm(int(command.get("got", 0)))
        return found

    def close(self) -> None:
        """Hang up. Who is there then knows by the socket's name, which is gone first, that this is the end."""
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self._drop()

    def _confirm(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _forget(self) -> None:
        """Drop the oldest events that a supervisor can do without, down to half of what may be kept."""
        kept: deque[tuple[int, str, bytes]] = deque()
        for entry in self._kept:
            if self._kept_bytes <= MAX_KEPT // 2 or entry[1] in ESSENTIAL:
                kept.append(entry)
            else:
                self._kept_bytes -= len(entry[2])
        self._kept = kept
        still = {number for number, _, _ in kept}
        self._waiting = deque(entry for entry in self._waiting if entry[0] in still)

    def _drop(self) -> None:
        if self._in is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self._in)
        if self._connection is not None:
            self._connection.close()
        self._connection = self._in = self._out = None
