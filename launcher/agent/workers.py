"""The agent's processes: one worker per rank in a session of its own, and everything that descends from them.

Standard library only. The agent and its guardian are subreapers: whatever a rank leaves behind, daemons too, stays a
descendant of theirs, so that "nothing is left" is read from the process tree and never guessed from names.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from hetctl.comm.contract import variables
from hetctl.launcher.agent.orders import WorkerOrder

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_EVENT_BYTES = 4 << 20  # one line of a worker's; longer ones are dropped
MAX_ERROR_BYTES = 256 << 10
KILL_S = 5.0
FAILED = 70  # exit code of an agent that an exception ended (EX_SOFTWARE)
WATCH_S = 1.0
STOPPED_S = 8.0  # a process that somebody stopped holds all others up: it is ended
HELD_UP_S = 1.0  # stopped for so long when another rank fails, it is why


class Child:
    """A process of the agent's that somebody may stop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.stopped_since: float | None = None

    def stopped_for(self) -> float:
        """Seconds since somebody stopped the process (SIGSTOP); 0 while it runs."""
        if _state(self.process.pid) != "T":
            self.stopped_since = None
            return 0.0
        self.stopped_since = self.stopped_since or time.monotonic()
        return time.monotonic() - self.stopped_since


class Worker(Child):
    """One rank's process: in a session of its own, with its log and its channel for events."""

    def __init__(self, spec: WorkerOrder, extra_env: dict[str, str]) -> None:
        self.rank, self.log = spec.rank, spec.log
        self.error_file = spec.env.get("TORCHELASTIC_ERROR_FILE", "")
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.channel = open(read_end, "rb", buffering=0)  # noqa: SIM115 - closed once the worker's end is
        environment = {**os.environ, **spec.env, **extra_env, variables.EVENTS: str(write_end)}
        os.makedirs(os.path.dirname(self.log), mode=0o700, exist_ok=True)  # what ranks print may hold secrets
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.error_file)
        try:
            with open(self.log, "ab") as log:
                self.log_start = log.tell()
                process = subprocess.Popen(
                    spec.argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=spec.cwd,
                    pass_fds=(write_end,),
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        finally:
            os.close(write_end)
        super().__init__(process)
        self.pending = b""
        self.reported = self.failing = False  # it has ended; it has written down an error

    def read_events(self) -> list[dict[str, Any]] | None:
        """Events that arrived; None once the worker has closed its end. What is no event is dropped."""
        data = self.channel.read(1 << 20)
        if data is None:
            return []
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        self.pending = self.pending[-MAX_EVENT_BYTES:]
        return [event for line in lines if (event := _event(line)) is not None]

    def signal_group(self, number: int) -> None:
        """Signal the worker's process group, if anything of it is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def error(self) -> Any:
        """What the rank wrote into its error file, None when it wrote nothing that can be read."""
        try:
            with open(self.error_file, "rb") as file:
                return json.loads(file.read(MAX_ERROR_BYTES))
        except (OSError, ValueError):
            return None


def die_with_parent() -> None:
    """In a child before its program starts: it is killed when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parents die."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def guard(on_loss: Callable[[int, bool], None]) -> None:
    """Go on in a child; the parent stays behind as its guardian and never returns.

    When the child dies, the guardian kills everything that descends from it. `on_loss(left, failed)` is called there
    when the child was killed, or failed (exit code FAILED), rather than ended, with the number of processes that could
    not be ended.
    """
    adopt_orphans()
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != guardian:
            os._exit(1)
        adopt_orphans()
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = _await_end(pid)
    left = kill_descendants()
    failed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == FAILED
    if failed or os.WIFSIGNALED(status):
        on_loss(left, failed)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _await_end(pid: int) -> int:
    """The status of a child once it has ended; one that stays stopped cannot keep its lease, and is ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    stopped = 0.0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        stopped = stopped + WATCH_S if _state(pid) == "T" else 0.0
        if stopped > STOPPED_S:
            os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_S)


def kill_descendants() -> int:
    """Kill all processes below this one and wait for them. Returns how many are left."""
    until = time.monotonic() + KILL_S
    while True:
        left = [pid for pid in descendants(os.getpid()) if _state(pid) != "Z"]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(spare=())
        if not left or time.monotonic() > until:
            return len(left)
        time.sleep(0.02)


def reap_orphans(*, spare: tuple[int, ...]) -> None:
    """Take the exit codes of dead children, but not of those in `spare`, which somebody else waits for."""
    for pid in descendants(os.getpid(), deep=False):
        if pid not in spare and _state(pid) == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(root: int, *, deep: bool = True) -> list[int]:
    """The processes below `root`, or only its children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    found, new = [], list(children.get(root, []))
    while new:
        pid = new.pop()
        found.append(pid)
        new += children.get(pid, []) if deep else []
    return found


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, group, session, ...; none when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].decode().split()
    except (OSError, ValueError):
        return []


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
