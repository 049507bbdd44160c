"""The supervisor: starts agents, passes on what happens, stops everything, and verifies that nothing is left."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetctl.comm.errors import WorkFailed
from hetctl.launcher.failure import Exit

BEAT_S = 2.0
LEASE_S = 15.0
STOP_GRACE_S = 60.0  # a rank finishes its step and saves
END_GRACE_S = 3.0  # a rank whose peers are gone has nothing to finish

Event = dict[str, Any]


@dataclass(frozen=True)
class HostSpec:
    """What one host's agent is given: the workers (rank, argv, env, log), and the store's address if it hosts it."""

    host: str
    workers: tuple[dict[str, Any], ...]
    store_address: str | None = None
    store_ports: tuple[int, ...] = (0,)


@dataclass
class Outcome:
    """How a run ended: every rank's exit, processes left behind (0 when verified), and whether it was stopped."""

    exits: list[Exit] = field(default_factory=list)
    left: int = 0
    interrupted: bool = False


class AgentLink:
    """A started agent: its process, commands in, events out (as JSON lines)."""

    def __init__(self, spec: HostSpec, events: queue.Queue[Event]) -> None:
        self.host = spec.host
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetctl.launcher.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the supervisor alone
            cwd=code_root(),
        )
        self.send(
            {
                "workers": spec.workers,
                "store_address": spec.store_address,
                "store_ports": spec.store_ports,
                "store_argv": [sys.executable, "-m", "hetctl.launcher.store"],
                "lease_s": LEASE_S,
                "grace_s": END_GRACE_S,
            }
        )
        self._thread = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._thread.start()

    def send(self, message: Event) -> None:
        """One command. An agent that is gone says so by its end-of-file, not here."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass

    def close(self) -> None:
        """End the agent's input and wait for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(timeout=LEASE_S + STOP_GRACE_S)
        self._thread.join(timeout=5.0)

    def _read(self, events: queue.Queue[Event]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                events.put({**json.loads(line), "host": self.host})
            except ValueError:
                continue  # not the agent's: a library printed something
        events.put({"event": "gone", "host": self.host})


class Supervisor:
    """One run from start to verified end."""

    def __init__(self, specs: Sequence[HostSpec], on_event: Callable[[Event], None]) -> None:
        self.specs, self.on_event = specs, on_event
        self.outcome = Outcome()
        self._events: queue.Queue[Event] = queue.Queue()
        self._links: list[AgentLink] = []
        self._done: set[str] = set()
        self._begun = False  # a rank reported work: stopping it can be polite
        self._ending = False

    def run(self) -> Outcome:
        """Start all agents and see the run through. Raises WorkFailed when an agent does not come up."""
        try:
            self._links = [AgentLink(spec, self._events) for spec in self.specs]
            port = self._wait_ready()
            self._broadcast({"do": "start", "store_port": port})
            self._loop()
        finally:
            for link in self._links:
                link.close()
        return self.outcome

    def stop(self) -> None:
        """Ask for an early end: ranks finish their step and save. A second call ends them at once."""
        if self.outcome.interrupted:
            self._broadcast({"do": "kill"})
        else:
            self.outcome.interrupted = True
            self._broadcast({"do": "stop", "grace_s": STOP_GRACE_S if self._begun else END_GRACE_S})

    def _wait_ready(self) -> int:
        port, waiting = 0, {link.host for link in self._links}
        while waiting:
            event = self._events.get()
            if event["event"] == "ready":
                waiting.discard(event["host"])
                port = event["store_port"] or port
            elif event["event"] == "gone":
                raise WorkFailed(f"the agent on {event['host']} did not start", hint="see its messages above")
        return port

    def _loop(self) -> None:
        next_beat = time.monotonic()
        while len(self._done) < len(self._links):
            if time.monotonic() >= next_beat:
                self._broadcast({"do": "beat"})
                next_beat = time.monotonic() + BEAT_S
            try:
                self._handle(self._events.get(timeout=0.2))
            except queue.Empty:
                continue

    def _handle(self, event: Event) -> None:
        kind = event["event"]
        if kind == "begin":
            self._begun = True
        elif kind == "exit":
            self.outcome.exits.append(Exit(event["rank"], event["code"], event["at"], asked=event["asked"]))
            if event["code"] != 0 and not self._ending:
                self._ending = True  # its peers can only wait for it now
                self._broadcast({"do": "stop", "grace_s": END_GRACE_S})
        elif kind == "done":
            self.outcome.left += event["left"]
            self._done.add(event["host"])
        elif kind == "gone" and event["host"] not in self._done:
            self._done.add(event["host"])
            self.outcome.exits.append(Exit(-1, 1, time.time()))
        self.on_event(event)

    def _broadcast(self, message: Event) -> None:
        for link in self._links:
            link.send(message)


def code_root() -> Path:
    """The folder that holds the `hetctl` package: where `python -m hetctl...` finds this very code."""
    import hetctl

    assert hetctl.__file__ is not None
    return Path(hetctl.__file__).parent.parent
