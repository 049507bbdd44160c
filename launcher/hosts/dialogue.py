"""Talking with a remote Python program: its text and a request go in as one line, JSON lines come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetctl.comm.contract.units import MiB
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import MAX_STDERR_BYTES, Session, Shell, ShellError, timed_out

MAX_LINE_BYTES = 4 * MiB
# constant: everything that varies, secrets too, comes on stdin, which stays open as the sign that we are still there
BOOT = "import sys;exec(sys.stdin.readline())"


class Dialogue:
    """A program that runs on a host: `send` JSON lines to it, `receive` its JSON lines, `close` ends it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buffer = bytearray()
        self._errors = bytearray()

    def send(self, document: Mapping[str, Any], *, deadline: Deadline) -> None:
        """One JSON line to its stdin. Raises ShellError when the deadline passes before it is taken."""
        self.write(json.dumps(document).encode() + b"\n", deadline=deadline)

    def write(self, data: bytes, *, deadline: Deadline) -> None:
        """Bytes to its stdin, taking in its output meanwhile. Raises ShellError."""
        rest = memoryview(data)
        while rest:
            taken = self._session.write(bytes(rest[:65536]))
            rest = rest[taken:]
            if rest:
                self._take(0.0 if taken else 0.01, deadline)

    def receive(self, *, deadline: Deadline) -> dict[str, Any]:
        """Its next JSON line; other lines (banners) are passed over. Raises ShellError: timeout, connection-lost."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                self._take(1.0, deadline)
                continue
            self._buffer = rest
            if line.startswith(b"{"):
                try:
                    return dict(json.loads(line))
                except (ValueError, RecursionError):
                    continue

    def close(self) -> None:
        self._session.close()

    def release(self) -> tuple[Session, bytes]:
        """The session, for somebody else to go on with, and what was already read of its output."""
        return self._session, bytes(self._buffer)

    def _take(self, seconds: float, deadline: Deadline) -> None:
        if deadline.passed:
            raise timed_out(deadline)
        if self._session.ended:
            said, code = self._errors[-300:].decode("utf-8", "replace").strip(), self._session.exit_code
            if code is None:
                how = f"the connection was lost, or the program on the host was killed (while {deadline.phase})"
            else:
                how = f"the program on the host ended early (exit {code})"
            raise ShellError("connection-lost", f"{how}: {said}" if said else how)
        piece = self._session.read(min(seconds, deadline.left()))
        if piece is None:
            return
        if piece.stream == "err":
            self._errors = (self._errors + piece.data)[-MAX_STDERR_BYTES:]
            return
        self._buffer += piece.data
        if len(self._buffer) > MAX_LINE_BYTES:
            raise ShellError("too-much-output", "the program on the host printed an endless line")


def converse(
    shell: Shell,
    python: str,
    source: str,
    request: Mapping[str, Any],
    *,
    deadline: Deadline,
    prefix: Sequence[str] = (),
) -> Dialogue:
    """Start a program (its `main` is given the request as JSON text) on a host, with nothing in its argv.

    `prefix` is what enters a container there (`docker exec -i NAME`).
    """
    argv: Sequence[str] = [*prefix, python, "-I", "-c", BOOT]
    session = shell.start(argv, deadline=deadline)
    deadline.on_expiry(session.abort)
    dialogue = Dialogue(session)
    scope = "{'__name__': 'hetctl_remote'}"
    program = (
        f"scope={scope};exec(compile({source!r},'<hetctl>','exec'),scope);scope['main']({json.dumps(request)!r})\n"
    )
    dialogue.write(program.encode(), deadline=deadline)
    return dialogue
