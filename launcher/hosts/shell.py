"""How a command runs on a host: a Shell starts a constant argv, a Session is that command, `run` sees it through."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hetctl.comm.contract.errors import Unreachable
from hetctl.comm.contract.units import KiB, MiB, show_bytes
from hetctl.launcher.hosts.deadline import Deadline

Problem = Literal[
    "invalid-name",
    "name-not-found",
    "no-route",
    "connection-refused",
    "timeout",
    "not-ssh",
    "unknown-host-key",
    "host-key-changed",
    "authentication-failed",
    "proxy-failed",
    "connection-lost",
    "command-refused",
    "no-such-command",
    "too-much-output",
    "unsupported",
    "no-python",
    "python-unsupported",
    "no-answer",
]
Stream = Literal["out", "err"]
MAX_OUTPUT_BYTES = 16 * MiB
MAX_STDERR_BYTES = 64 * KiB  # the rest is dropped: a person reads the beginning
_CHUNK = 64 * KiB


class ShellError(Unreachable):
    """A host could not be entered or did not do as asked; `problem` is the word scripts and files use for it."""

    def __init__(self, problem: Problem, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.problem: Problem = problem


@dataclass(frozen=True)
class OutputPiece:
    """Some output of a command."""

    stream: Stream
    data: bytes


class Session(Protocol):
    """A command that runs. No method blocks longer than it is told to."""

    def write(self, data: bytes) -> int:
        """Give it what its stdin takes now; the count of bytes taken, all of them once it no longer reads."""

    def finish(self) -> None:
        """End of file on its stdin."""

    def read(self, timeout_s: float) -> OutputPiece | None:
        """The next output, None when there was none within `timeout_s`."""

    @property
    def ended(self) -> bool:
        """Whether it is over and all its output was read."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal), None while it runs or when the connection was lost before it said."""

    def abort(self) -> None:
        """End it from another thread: its process group is killed here, its channel closed there."""

    def close(self) -> None:
        """Give it up and release what it held. Any number of times."""


class Shell(Protocol):
    """A way to start commands on one host."""

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> Session:
        """Start a constant command; all variable data goes to its stdin. Raises ShellError."""

    def close(self) -> None:
        """Leave the host."""


@dataclass(frozen=True)
class Finished:
    """A command that ended by itself."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float


def run(
    shell: Shell,
    argv: Sequence[str],
    *,
    deadline: Deadline,
    stdin: bytes = b"",
    max_bytes: int = MAX_OUTPUT_BYTES,
    cut: bool = False,
) -> Finished:
    """Run a command to its end, feeding `stdin` and collecting at most `max_bytes` of its output.

    More of it is an error, unless it may be `cut`. Raises ShellError: timeout, too-much-output, connection-lost, ...
    """
    begin = time.monotonic()
    session = shell.start(argv, deadline=deadline)
    deadline.on_expiry(session.abort)
    try:
        collected = _see_through(session, stdin, deadline, max_bytes, cut)
        if session.exit_code is None:
            raise ShellError("connection-lost", f"the connection was lost while {deadline.phase}")
        return Finished(session.exit_code, collected["out"], collected["err"], time.monotonic() - begin)
    finally:
        session.close()


def timed_out(deadline: Deadline) -> ShellError:
    """The error of a deadline that passed, naming what was going on."""
    return ShellError(
        "timeout",
        f"no answer within {deadline.seconds:g} s (while {deadline.phase})",
        hint="raise --timeout if it is slow",
    )


def _see_through(session: Session, stdin: bytes, deadline: Deadline, max_bytes: int, cut: bool) -> dict[Stream, bytes]:
    kept: dict[Stream, bytearray] = {"out": bytearray(), "err": bytearray()}
    unsent = memoryview(stdin)
    sending = True
    while not session.ended:
        if deadline.passed:
            raise timed_out(deadline)
        if sending:
            unsent = unsent[session.write(bytes(unsent[:_CHUNK])) :] if unsent else unsent
            if not unsent:
                session.finish()
                sending = False
        piece = session.read(min(deadline.left(), 0.01 if sending else 1.0))
        if piece is not None:
            _keep(kept, piece, max_bytes, cut)
    return {stream: bytes(data) for stream, data in kept.items()}


def _keep(kept: dict[Stream, bytearray], piece: OutputPiece, max_bytes: int, cut: bool) -> None:
    if piece.stream == "err":
        kept["err"] += piece.data[: max(0, MAX_STDERR_BYTES - len(kept["err"]))]
        return
    room = max_bytes - len(kept["out"])
    if len(piece.data) > room and not cut:
        raise ShellError(
            "too-much-output",
            f"the host answered with more than {show_bytes(max_bytes)}",
            hint="what does its shell print?",
        )
    kept["out"] += piece.data[:room]
