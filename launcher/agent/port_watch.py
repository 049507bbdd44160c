"""Link watching during a run: the state of a host's network ports as sysfs tells it, the rule that says when one has
become worse, and a thread that looks at the ports that the run uses. Standard library only: agents use it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetctl.comm.contract.events import PortChanged
from hetctl.launcher.agent.orders import WatchedPort

STATES = ("down", "rate")  # which end when they are not seen any more; errors and flaps after QUIET_S
EVERY_S = 10.0
HANGS_S = 30.0  # a look that takes longer: the driver does not answer
QUIET_S = 60.0
RISE = 100  # errors between two looks that count at once; fewer count when they rise look after look
_NET_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")
_RDMA_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_GRAVE = ("link_downed", "link_error_recovery")  # one of these is enough


@dataclass(frozen=True)
class PortState:
    """One port now: None is unknown."""

    up: bool | None
    state: str | None = None  # in the kernel's words
    bits_per_s: float | None = None
    counters: dict[str, int] = field(default_factory=dict)  # errors and losses of link, ever rising


class PortWatch:
    """Watches `ports` from `start` on; `look` is asked at every turn of the agent.

    A thread does it, because a driver in trouble may hold a read of its files for as long as it likes.
    """

    def __init__(self, *, every_s: float = EVERY_S, read: Callable[[WatchedPort], PortState] | None = None) -> None:
        self._every_s, self._read = every_s, read or read_port
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


def read_port(watched: WatchedPort, *, root: str = "/") -> PortState:
    """A port as /sys has it now: the RDMA device's where there is one, with the counters of both."""
    net = os.path.join(root, "sys/class/net", watched.name)
    counters = {key: _number(os.path.join(net, "statistics", key)) for key in _NET_ERRORS}
    counters["carrier_changes"] = _number(os.path.join(net, "carrier_changes"))
    port = _net(net)
    if watched.rdma is not None:
        folder = os.path.join(root, "sys/class/infiniband", watched.rdma, "ports", str(watched.rdma_port or 1))
        port = _rdma(folder) or port
        counters |= {key: _number(os.path.join(folder, "counters", key)) for key in _RDMA_ERRORS}
    return PortState(port.up, port.state, port.bits_per_s, {k: v for k, v in counters.items() if v is not None})


def worse(
    start: PortState, before: PortState, now: PortState, *, rising: frozenset[str] = frozenset()
) -> dict[str, str]:
    """What is worse than when the run started: `down`, `rate` or a counter's name, and what to say of it.

    Errors count when they rise by RISE since `before`, the last look, or rose (`rising`) up to it already.
    """
    if start.up and now.up is False:
        return {"down": f"down ({now.state or 'no carrier'})"}
    found = {}
    if start.bits_per_s and now.bits_per_s and now.bits_per_s < start.bits_per_s:
        found["rate"] = f"at {_rate(now.bits_per_s)} instead of {_rate(start.bits_per_s)}"
    for name, count in now.counters.items():
        more = count - before.counters.get(name, count)
        if name == "carrier_changes" and more > 0:
            found[name] = "its carrier was lost for a moment"
        elif more >= RISE or (more > 0 and name in {*rising, *_GRAVE}):
            found[name] = f"{name} rose by {more}"
    return found


def rose(before: PortState, now: PortState) -> frozenset[str]:
    """The counters that rose between two looks."""
    return frozenset(k for k, v in now.counters.items() if v > before.counters.get(k, v))


def _net(folder: str) -> PortState:
    state = _text(os.path.join(folder, "operstate"))
    if state is None and not os.path.isdir(folder):
        return PortState(False, "gone")
    if state in (None, "unknown"):  # drivers that do not say: the carrier does
        carrier = _number(os.path.join(folder, "carrier"))
        return PortState(None if carrier is None else carrier == 1, state)
    megabits = _number(os.path.join(folder, "speed"))  # unreadable, or -1, while it is down
    return PortState(state == "up", state, megabits * 1e6 if megabits and megabits > 0 else None)


def _rdma(folder: str) -> PortState | None:
    state, rate = _text(os.path.join(folder, "state")), _text(os.path.join(folder, "rate"))
    if state is None:
        return None
    found = re.match(r"([\d.]+)\s*Gb", rate or "")
    return PortState("ACTIVE" in state, state.partition(": ")[2] or state, float(found[1]) * 1e9 if found else None)


def _text(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(256).strip()
    return None


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.removeprefix("-").isdigit() else None


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gb/s"
