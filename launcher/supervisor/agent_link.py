"""The supervisor's end of one agent: commands out, events in, and coming back when the line is lost."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.events import Done, Gone, Lost, Told, document, told
from hetctl.launcher.agent.orders import Beat, Order, Part
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.shell import Session, Shell

SILENT_S = 7.0  # agents answer every beat; this long without a word the line counts as lost
RETRY_S = 1.0
SEND_S = 30.0
MAX_LINE_BYTES = 16 << 20


class AgentGone(HetctlError):
    """Its host answers, but the agent is no longer there: coming back is no use."""


Reopen = Callable[[Deadline], tuple[Session, bytes]]


class AgentLink:
    """One agent of a run. `Gone` is the last event when it was lost for good."""

    def __init__(
        self,
        host: str,
        session: Session,
        shells: list[Shell],
        *,
        first: bytes = b"",
        reopen: Reopen | None = None,
        lease_s: float = 0.0,
    ) -> None:
        self.host, self._shells = host, shells  # `reopen` adds to them
        self.finished = False  # it said its last word
        self._session, self._buffer = session, first
        self._reopen, self._lease_s = reopen, lease_s
        self._got = 0  # number of the last event; what comes again after a reconnection is known by it
        self._given = 0  # number of the last order
        self._untaken: deque[tuple[int, bytes]] = deque()  # orders that no answer to a beat has confirmed
        self._lost = False  # the line, until there is another one
        self._said = b""  # the end of its stderr
        self._heard = time.monotonic()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, events: queue.SimpleQueue[Any]) -> None:
        """Put its events into the queue from now on."""
        self._heard = time.monotonic()  # nobody listened before: what the launcher does first may take long
        self._thread = threading.Thread(target=self._run, args=(events,), name=f"agent {self.host}", daemon=True)
        self._thread.start()

    def send(self, order: Order) -> None:
        """One order, given again where the line is lost before the agent took it. One that is gone says so by its
        silence, not here."""
        with self._lock:
            again = not isinstance(order, (Beat, Part))
            self._given += again
            number = {"order": self._given} if again else {}
            data = json.dumps({**document(order), **number, "got": self._got}).encode() + b"\n"
            if again:
                self._untaken.append((self._given, data))
            self._write(data)

    def close(self, *, wait_s: float) -> None:
        """Hang up, and wait until the agent has ended (it ends its ranks first)."""
        until = time.monotonic() + wait_s
        self._reopen = None
        self._session.finish()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        self._closing.set()
        self._session.close()
        for shell in self._shells:
            shell.close()

    def complaint(self) -> str:
        """The last thing it said on stderr."""
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _write(self, data: bytes) -> None:
        until = time.monotonic() + SEND_S
        while data and not (self._lost or self._closing.is_set()):
            taken = self._session.write(data[:65536])
            data = data[taken:]
            if not taken:
                time.sleep(0.005)
                if time.monotonic() > until:  # nothing may follow half an order
                    self._lost = True
                    self._session.abort()

    def _run(self, events: queue.SimpleQueue[Any]) -> None:
        try:
            while not self._closing.is_set():
                self._read(events)
                self._lost = True
                if self.finished or not self._come_back():
                    break
        except Exception as error:  # whatever it was, the supervisor must hear that there is no more to come
            self._said = f"{type(error).__name__}: {error}".encode()
        finally:
            events.put(Told(Gone(self.finished, self.complaint()), self.host))

    def _read(self, events: queue.SimpleQueue[Any]) -> None:
        """Until the session ends or falls silent."""
        session = self._session
        self._take_lines(events)
        while not (session.ended or self._closing.is_set()):
            piece = session.read(0.5)
            if piece is None:  # only then: it may be this process that was held up, with answers waiting
                if self._reopen is not None and time.monotonic() - self._heard > SILENT_S:
                    return
            elif piece.stream == "err":
                self._said = (self._said + piece.data)[-4096:]
            else:
                self._heard = time.monotonic()
                self._buffer = (self._buffer + piece.data)[-MAX_LINE_BYTES:]
                self._take_lines(events)

    def _take_lines(self, events: queue.SimpleQueue[Any]) -> None:
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take(line, events)

    def _take(self, line: bytes, events: queue.SimpleQueue[Any]) -> None:
        try:
            said = json.loads(line)
            number = int(said.get("n", 0))
        except (ValueError, AttributeError, TypeError, RecursionError):
            return  # not the agent's: a library printed something
        while self._untaken and self._untaken[0][0] <= said.get("took", 0):
            self._untaken.popleft()
        if number and number <= self._got:
            return
        self._got = max(self._got, number)
        if (heard := told(said, self.host)) is None:
            return  # an answer to a beat, or a program's own word
        if isinstance(heard.event, (Done, Lost)):
            self.finished = True
            self.send(Part())  # which confirms it: the agent waits for that
        events.put(heard)

    def _come_back(self) -> bool:
        """A new line to the same agent, tried until its lease must have lapsed."""
        until = self._heard + self._lease_s
        while self._reopen is not None and time.monotonic() < until and not self._closing.is_set():
            left = max(0.5, until - time.monotonic())
            (outcome,) = fan_out([self._reopen], lambda reopen, deadline: reopen(deadline), deadline_s=left)
            if isinstance(outcome.error, AgentGone):
                self._said = self._said or outcome.error.message.encode()
                return False
            if outcome.value is not None:
                with self._lock:
                    old, (self._session, self._buffer) = self._session, outcome.value
                    self._heard, self._lost = time.monotonic(), False
                    for _, data in self._untaken:
                        self._write(data)
                old.abort()
                return True
            self._closing.wait(RETRY_S)
        return False
