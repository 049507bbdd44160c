"""Link watching during a run: a thread looks at the ports that the run uses, and says which has become worse.

Standard library only. A thread, because a driver in trouble may hold a read of its files for as long as it likes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from hetctl.comm.contract.events import PortChanged
from hetctl.launcher.agent.orders import WatchedPort
from hetctl.launcher.agent.port_state import PortState, read_port, rose, worse

STATES = ("down", "rate")  # which end when they are not seen any more; errors and flaps after QUIET_S
EVERY_S = 10.0
HANGS_S = 30.0  # a look that takes longer: the driver does not answer
QUIET_S = 60.0

Look = Callable[[WatchedPort], PortState]


class PortWatch:
    """Watches `ports` from `start` on; `look` is asked at every turn of the agent."""

    def __init__(self, *, every_s: float = EVERY_S, read: Look | None = None) -> None:
        self._every_s, self._read = every_s, read or _read
        self._events: queue.SimpleQueue[PortChanged] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._looking: tuple[str, float] | None = None  # the port that is being read, since when
        self._hung = ""

    def start(self, ports: Sequence[WatchedPort]) -> None:
        if ports:
            threading.Thread(target=self._run, args=(list(ports),), name="links", daemon=True).start()

    def look(self) -> list[PortChanged]:
        """What changed."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        looking = self._looking
        if looking and not self._hung and time.monotonic() - looking[1] > HANGS_S:
            self._hung = looking[0]
            found.append(PortChanged(looking[0], f"its driver has not answered for {HANGS_S:.0f} s"))
        return found

    def close(self) -> None:
        self._ended.set()

    def _run(self, ports: list[WatchedPort]) -> None:
        history = [PortHistory(port.name, self._timed(port)) for port in ports]
        while not self._ended.wait(self._every_s):
            for port, past in zip(ports, history, strict=True):
                event = past.judge(self._timed(port), time.monotonic())
                if event is not None:
                    self._events.put(event)

    def _timed(self, port: WatchedPort) -> PortState:
        self._looking = (port.name, time.monotonic())
        found = self._read(port)
        self._looking = None
        if self._hung == port.name:
            self._hung = ""
            self._events.put(PortChanged(port.name, None))
        return found


class PortHistory:
    """One port since the run began: what is the matter with it now."""

    def __init__(self, name: str, start: PortState) -> None:
        self.name, self.start, self.before = name, start, start
        self.rising: frozenset[str] = frozenset()
        self.matters: dict[str, float] = {}  # kind -> when it was last seen

    def judge(self, now: PortState, at: float) -> PortChanged | None:
        """An event when something else is the matter than before, or nothing any more; `at` in seconds."""
        found = worse(self.start, self.before, now, rising=self.rising)
        self.rising, self.before = rose(self.before, now), now
        was = set(self.matters)
        self.matters = {k: t for k, t in self.matters.items() if k not in STATES and at - t < QUIET_S}
        if "down" in found:
            self.matters = {}
        self.matters |= dict.fromkeys(found, at)
        if not set(self.matters) - was:  # nothing new: say when it is over
            return PortChanged(self.name, None) if was and not self.matters else None
        return PortChanged(self.name, ", ".join(found.values()))


def _read(port: WatchedPort) -> PortState:
    return read_port(port.name, port.rdma, port.rdma_port or 1)
