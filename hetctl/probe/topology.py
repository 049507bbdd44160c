"""How near devices of one host are to each other, read off the PCI tree that sysfs shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hetctl.comm.contract.facts import NEARNESS, Near, Reach

_BRIDGE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
PCI = "/sys/bus/pci/devices/"


def branch(links: Mapping[str, str], pci: str) -> tuple[str, ...]:
    """The way from the host bridge down to a device: ('pci0000:16', '0000:16:01.0', ..., the device)."""
    parts = links.get(PCI + pci, "").strip("/").split("/")
    roots = [i for i, part in enumerate(parts) if part.startswith("pci")]
    if not roots:
        return ()
    way = parts[roots[-1] :]
    return (way[0], *(part for part in way[1:] if _BRIDGE.match(part)))


def pci_of(path: str) -> str | None:
    """The PCI function that a device path in /sys/devices runs through last (a virtio device hangs below one)."""
    functions = [part for part in path.split("/") if _BRIDGE.match(part)]
    return functions[-1] if functions else None


def distance(a: tuple[str, ...], b: tuple[str, ...], nodes: tuple[int | None, int | None]) -> Near | None:
    """PIX: one switch or bridge between them; PXB: several; PHB: one host bridge; NODE: one NUMA node; SYS: beyond.

    `a` and `b` are branches, `nodes` the NUMA nodes. None when sysfs does not tell.
    """
    if not a or not b:
        return None
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    if shared == 0:
        if None in nodes:
            return None
        return "node" if nodes[0] == nodes[1] else "sys"
    if shared == 1:
        return "phb"
    return "pix" if max(len(a), len(b)) - shared <= 2 else "pxb"


def nearest_first(reaches: Iterable[Reach]) -> tuple[Reach, ...]:
    """Sorted by nearness; the given order is kept among equals."""
    return tuple(sorted(reaches, key=lambda reach: NEARNESS.index(reach.path)))
