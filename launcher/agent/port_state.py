"""The state of a host's network ports as sysfs tells it, and the rule that says when one has become worse. Pure but
for `read_port`. Standard library only: agents use it.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field

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


def read_port(name: str, rdma: str | None = None, rdma_port: int = 1, *, root: str = "/") -> PortState:
    """A port as /sys has it now: the RDMA device's where there is one, with the counters of both."""
    net = os.path.join(root, "sys/class/net", name)
    counters = {key: _number(os.path.join(net, "statistics", key)) for key in _NET_ERRORS}
    counters["carrier_changes"] = _number(os.path.join(net, "carrier_changes"))
    port = _net(net)
    if rdma is not None:
        folder = os.path.join(root, "sys/class/infiniband", rdma, "ports", str(rdma_port))
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
