"""The agent: owns one host's workers. Started by a constant command; all variable data comes as JSON on stdin.

Protocol, one JSON object a line. In: the spec, then {"do": "start"|"beat"|"stop"|"kill"}. Out: events "ready",
"started", whatever a worker reports, "exit", and at last "done" with the number of processes left (0).
End-of-file on stdin or a lapsed lease ends every worker. Standard library only: a host needs nothing else for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any

TICK_S = 0.1
PR_SET_PDEATHSIG = 1


class Worker:
    """One rank's process: in a session of its own, with its log and its channel for events."""

    def __init__(self, spec: dict[str, Any], extra_env: dict[str, str]) -> None:
        self.rank = int(spec["rank"])
        self.events_fd, write_end = os.pipe()
        environment = {**os.environ, **spec["env"], **extra_env, "HETCTL_EVENTS_FD": str(write_end)}
        os.makedirs(os.path.dirname(spec["log"]), exist_ok=True)
        with open(spec["log"], "ab") as log:
            self.process = subprocess.Popen(
                spec["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.get("cwd"),
                pass_fds=(write_end,),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        os.close(write_end)
        os.set_blocking(self.events_fd, False)
        self.pending = b""
        self.reported = False

    def read_events(self) -> list[dict[str, Any]] | None:
        """Events that arrived; None once the worker has closed its end."""
        try:
            data = os.read(self.events_fd, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def signal_group(self, number: int) -> bool:
        """Signal the worker's process group; False when nothing of it is left."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Agent:
    """Starts the workers of a spec, relays their events, and leaves nothing behind."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.spec: dict[str, Any] = json.loads(stdin.readline())
        self.workers: list[Worker] = []
        self.store: subprocess.Popen[bytes] | None = None
        self.selector = selectors.DefaultSelector()
        self.deadline: float | None = None  # when TERM becomes KILL
        self.last_beat = time.monotonic()

    def run(self) -> int:
        """Until every worker is gone. Returns 0 when all of them ended well."""
        self._announce()
        os.set_blocking(self.stdin.fileno(), False)
        self.selector.register(self.stdin.fileno(), selectors.EVENT_READ, None)
        started = False
        while not (started and all(w.reported for w in self.workers)):
            for key, _ in self.selector.select(TICK_S):
                if key.data is not None:
                    self._relay(key.data)
                elif self._obey() == "start":
                    self._start()
                    started = True
            self._check_lease()
            self._reap()
            if not started and self.deadline is not None:
                break
        return self._finish()

    def _announce(self) -> None:
        port = None
        if self.spec.get("store_address"):
            listener = _listen(self.spec["store_address"], self.spec.get("store_ports") or [0])
            port = listener.getsockname()[1]
            argv = [*self.spec["store_argv"], str(listener.fileno()), self.spec["store_address"], str(port)]
            self.store = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            listener.close()
        self._tell(event="ready", pid=os.getpid(), store_port=port)

    def _start(self) -> None:
        extra = {"MASTER_PORT": str(self.spec["store_port"])}
        for spec in self.spec["workers"]:
            worker = Worker(spec, extra)
            self.workers.append(worker)
            self.selector.register(worker.events_fd, selectors.EVENT_READ, worker)
            self._tell(event="started", rank=worker.rank, pid=worker.process.pid)

    def _obey(self) -> str:
        """Act on what the supervisor sent; end-of-file means that nobody is left to work for."""
        data = self.stdin.read()
        if data == b"":
            self.selector.unregister(self.stdin.fileno())
            self._end(self.spec["grace_s"])
            return "end"
        self.last_beat = time.monotonic()
        asked = ""
        for line in (data or b"").splitlines():
            command = json.loads(line)
            if command["do"] == "start":
                self.spec["store_port"] = command["store_port"]
                asked = "start"
            elif command["do"] == "stop":
                self._end(command["grace_s"])
            elif command["do"] == "kill":
                self._end(0.0)
        return asked

    def _check_lease(self) -> None:
        now = time.monotonic()
        if now - self.last_beat > self.spec["lease_s"]:
            self._end(self.spec["grace_s"])
        if self.deadline is not None and now >= self.deadline:
            for worker in self.workers:
                worker.signal_group(signal.SIGKILL)

    def _end(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        if self.deadline is None:
            for worker in self.workers:
                worker.signal_group(signal.SIGTERM)
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def _relay(self, worker: Worker) -> None:
        events = worker.read_events()
        if events is None:
            self.selector.unregister(worker.events_fd)
            os.close(worker.events_fd)
        for event in events or []:
            self._tell(**{**event, "rank": worker.rank})

    def _reap(self) -> None:
        for worker in self.workers:
            code = None if worker.reported else worker.process.poll()
            if code is None:
                continue
            if worker.events_fd in self.selector.get_map():
                self._relay(worker)  # what it said last
            worker.reported = True
            worker.signal_group(signal.SIGKILL)  # children it left behind
            self._tell(event="exit", rank=worker.rank, code=code, at=time.time(), asked=self.deadline is not None)

    def _finish(self) -> int:
        until = time.monotonic() + 5.0
        while (left := sum(w.signal_group(0) for w in self.workers)) and time.monotonic() < until:
            for worker in self.workers:
                worker.signal_group(signal.SIGKILL)
            time.sleep(TICK_S)
        if self.store is not None:
            self.store.kill()
            self.store.wait()
        self._tell(event="done", left=left)
        return 0 if all(w.process.returncode == 0 for w in self.workers) else 1

    def _tell(self, **event: Any) -> None:
        try:
            self.stdout.write(json.dumps(event).encode() + b"\n")
            self.stdout.flush()
        except BrokenPipeError:
            pass  # nobody listens any more; the workers still have to be ended


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _listen(address: str, ports: list[int]) -> socket.socket:
    """A listening socket on the first free port: bound here, so that nobody else can take it meanwhile."""
    for port in ports:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    raise SystemExit(f"no free port on {address} among {ports[0]}-{ports[-1]}")


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    sys.exit(Agent(sys.stdin.buffer, sys.stdout.buffer).run())


if __name__ == "__main__":
    main()
