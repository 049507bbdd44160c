"""perftest (ib_write_bw, ib_write_lat) where hosts have it: what to run on both ends, and how to read its table."""

from __future__ import annotations

import re
from typing import Literal

Tool = Literal["ib_write_bw", "ib_write_lat"]
DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]")


def argv(tool: Tool, device: str, port: int, *, server: str | None = None, seconds: int = 2) -> list[str]:
    """The command of one end: the listener without `server`, the caller with the listener's address.

    Raises ValueError for a device name that is none: it came from a host and goes into a command.
    """
    if not DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is not the name of an RDMA device")
    words = [tool, "-d", device, "-p", str(port), "-F"]
    words += (
        ["-s", "1048576", "-D", str(seconds), "-b", "--report_gbits"]
        if tool == "ib_write_bw"
        else ["-s", "64", "-n", "1000"]
    )
    return words + ([server] if server else [])


def parse_bandwidth(text: str) -> float | None:
    """Bytes per second (average, per direction) from ib_write_bw -b --report_gbits; None when there is no table."""
    columns = _columns(text, "BW average")
    return float(columns[3]) * 1e9 / 8 / 2 if columns and len(columns) > 3 else None


def parse_latency(text: str) -> float | None:
    """The typical one-way latency in seconds from ib_write_lat; None when there is no table."""
    columns = _columns(text, "t_typical")
    return float(columns[4]) * 1e-6 if columns and len(columns) > 4 else None


def _columns(text: str, head: str) -> list[str] | None:
    """The numbers of the last row below the line that names `head`."""
    below = False
    found: list[str] | None = None
    for line in text.splitlines():
        if head in line:
            below = True
        elif below and _ROW.match(line):
            found = line.split()
    return found
