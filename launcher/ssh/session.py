"""A connected host as a Shell, and a command there as a Session over one channel."""

from __future__ import annotations

import contextlib
import select
import shlex
import time
from collections.abc import Sequence

import paramiko

from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import OutputPiece, ShellError, timed_out

_CHUNK = 256 * 1024
_LOST = (OSError, EOFError, paramiko.SSHException)  # what paramiko raises over a transport that is gone
_LINGER_S = 0.3  # how long output is awaited after the command itself has ended


class SshShell:
    """Commands on a host that was connected to."""

    def __init__(self, client: paramiko.SSHClient, name: str) -> None:
        self.name = name
        self._client = client

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> SshSession:
        """Start `argv`, each word quoted for the host's login shell. Raises ShellError."""
        transport = self._client.get_transport()
        if transport is None or not transport.is_active():
            raise ShellError("connection-lost", f"the connection to {self.name} is closed")
        deadline.phase = f"starting {argv[0]} on {self.name}"
        try:
            channel = transport.open_session(timeout=max(0.1, deadline.left()))
            channel.settimeout(max(0.1, deadline.left()))
            channel.exec_command(" ".join(map(_quoted, argv)))
        except (paramiko.SSHException, EOFError, OSError) as error:
            if deadline.passed or isinstance(error, TimeoutError):
                raise timed_out(deadline) from None
            raise ShellError("command-refused", f"{self.name} does not run commands: {error}") from None
        deadline.phase = f"waiting for {argv[0]} on {self.name}"
        return SshSession(channel)

    def close(self) -> None:
        self._client.close()


def _quoted(word: str) -> str:
    """A word for the host's login shell, which alone knows where `~/` is there."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


class SshSession:
    """A command at the other end of a channel."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        channel.setblocking(False)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)  # readable on output of either stream, and at its end
        self.ended = False

    def write(self, data: bytes) -> int:
        if self._channel.closed:
            return len(data)
        if not self._channel.send_ready():
            return 0
        try:
            return self._channel.send(data)
        except TimeoutError:
            return 0
        except _LOST:
            return len(data)  # it is closed: the exit code will say why

    def finish(self) -> None:
        with contextlib.suppress(*_LOST):
            self._channel.shutdown_write()

    def read(self, timeout_s: float) -> OutputPiece | None:
        end = time.monotonic() + timeout_s
        while True:
            piece = self._take()
            if piece is not None:
                return piece
            channel = self._channel
            if channel.closed or (channel.eof_received and channel.exit_status_ready()):
                piece = self._take()  # what came between the last look and the end
                self.ended = piece is None
                return piece
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._await(min(left, _LINGER_S))

    @property
    def exit_code(self) -> int | None:
        if not self._channel.exit_status_ready() or self._channel.exit_status == -1:
            return None  # -1 is paramiko's word for: the host never said
        return self._channel.exit_status

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(*_LOST):
            self._channel.close()

    def _take(self) -> OutputPiece | None:
        with contextlib.suppress(*_LOST):
            if self._channel.recv_ready():
                return OutputPiece("out", self._channel.recv(_CHUNK))
            if self._channel.recv_stderr_ready():
                return OutputPiece("err", self._channel.recv_stderr(_CHUNK))
        return None

    def _await(self, seconds: float) -> None:
        """Until there is output; after its end until there is an exit code; after an exit code only a moment."""
        channel = self._channel
        if channel.eof_received:
            channel.status_event.wait(seconds)
            return
        over = channel.exit_status_ready()
        if not self._poll.poll(seconds * 1000) and over and seconds >= _LINGER_S:
            channel.close()  # something it left behind holds its output open
