"""What RDMA ports counted, the witness beside an engine's own account that bytes took them; and whether they are up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/class/infiniband")
# bytes / 4 of real ports; packets of the kernel's software port
_COUNTERS = (
    *("counters/port_xmit_data", "counters/port_rcv_data", "counters/port_xmit_packets", "counters/port_rcv_packets"),
    *("hw_counters/sent_pkts", "hw_counters/rcvd_pkts"),
)


def port_counters(ports: Sequence[str], root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Port (`mlx5_0:1`) -> counter -> value, of those that there are."""
    found: dict[str, dict[str, int]] = {}
    for port in ports:
        device, _, number = port.partition(":")
        base = root / device / "ports" / (number or "1")
        values = {name.rpartition("/")[2]: _value(base / name) for name in _COUNTERS}
        found[port] = {name: value for name, value in values.items() if value is not None}
    return found


def is_down(port: str, root: Path = ROOT) -> bool:
    """Whether a port says that it carries nothing now; one that says nothing is not down."""
    device, _, number = port.partition(":")
    try:
        return "ACTIVE" not in (root / device / "ports" / (number or "1") / "state").read_text()
    except OSError:
        return False


def _value(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
