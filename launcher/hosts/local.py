"""This machine as a Shell: a child in a session of its own, its whole process group killed when given up."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import OutputPiece, ShellError, Stream

_CHUNK = 256 * 1024
_LINGER_S = 0.3  # how long output is awaited after the command itself has ended


class LocalShell:
    """Commands on this machine, without SSH. `prefix` comes before each of them: what starts it elsewhere (srun)."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.prefix = prefix

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> LocalSession:
        """Start `argv`. Raises ShellError when there is no such program."""
        whole = [*self.prefix, *map(os.path.expanduser, argv)]
        try:
            return LocalSession(whole)
        except OSError as error:
            raise ShellError("no-such-command", f"{whole[0]} cannot be started here: {error.strerror}") from None

    def close(self) -> None:
        """Nothing to leave."""


class LocalSession:
    """A child process and its three pipes, none of which blocks.

    Another thread may close it than reads and writes: under the lock a descriptor's number is its own.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, cwd="/")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._lock = threading.Lock()
        self._code: int | None = None
        self._in: int | None = self._process.stdin.fileno()
        self._open: dict[int, Stream] = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}
        self._poll = select.poll()
        for fd in self._open:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)
        os.set_blocking(self._in, False)

    def write(self, data: bytes) -> int:
        try:
            with self._lock:
                return len(data) if self._in is None else os.write(self._in, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return len(data)  # it does not want it: its exit code will say why

    def finish(self) -> None:
        with self._lock:
            if self._in is not None and self._process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                self._in = None

    def read(self, timeout_s: float) -> OutputPiece | None:
        end = time.monotonic() + timeout_s
        while self._open:
            wait = max(0.0, min(_LINGER_S, end - time.monotonic()))
            over = self.exit_code is not None
            ready = self._poll.poll(wait * 1000)
            for fd, _ in ready:
                piece = self._take(fd)
                if piece is not None:
                    return piece
            if not ready and over and wait >= _LINGER_S:
                self._drop_all()  # a grandchild holds the pipe; the command itself is over
            if time.monotonic() >= end:
                return None
        while self.exit_code is None and time.monotonic() < end:
            time.sleep(0.01)  # its output is closed: it is about to end
        return None

    @property
    def ended(self) -> bool:
        return not self._open and self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        if self._code is None:
            # the zombie is left unreaped until `close`, so that its process group's number stays its own
            try:
                state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if state is not None:
                    self._code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
            except ChildProcessError:  # reaped: somebody closed the session meanwhile
                self._code = self._process.returncode
        return self._code

    def abort(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:  # once reaped, its number may be another's
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        self.abort()
        self.finish()
        with self._lock:
            self._drop_all()
            for stream in (self._process.stdout, self._process.stderr):
                if stream:
                    stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it beyond any signal
                self._process.wait(1.0)

    def _take(self, fd: int) -> OutputPiece | None:
        with self._lock:
            if (stream := self._open.get(fd)) is None:
                return None  # closed since it was waited for
            try:
                data = os.read(fd, _CHUNK)
            except OSError:
                return None
            if data:
                return OutputPiece(stream, data)
            self._drop(fd)
        return None

    def _drop(self, fd: int) -> None:
        if self._open.pop(fd, None):
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)

    def _drop_all(self) -> None:
        for fd in list(self._open):
            self._drop(fd)
