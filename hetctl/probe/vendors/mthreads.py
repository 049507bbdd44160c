"""Moore Threads GPUs: sysfs first, then the table of `mthreads-gmi`.

Written from published outputs and sources (docs/adding-a-vendor.md names them); never run on one.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.facts import GpuFacts, Health, Pcie
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.vendors.base import Tool, Vendor, beside_sysfs, bound_devices, parsed
from hetctl.probe.words import count, number, pci_address, size, told

NAME, PCI_VENDOR, DRIVERS = "mthreads", "0x1ed5", ("mtgpu",)
GMI = "mthreads-gmi"
TOOLS = {GMI: Tool((GMI,))}
_TOLD = ("name", "memory_total_bytes", "memory_free_bytes", "driver")
_UNREAD = ("uuid", "serial", "architecture", "processes")
_FIRST = re.compile(r"^(\d{1,3})\s+([^\s|][^|]*)\|\s*([0-9a-fA-F:.]+)\s*\|\s*\S+\s+(\d+)MiB\((\d+)MiB\)\s*$")
_SECOND = re.compile(r"\|\s*(\d+)x\((\d+)x\)\s*\|\s*(\S+)")


def gpus(raw: Raw, notes: Notes) -> tuple[GpuFacts, ...]:
    """Every GPU that the tool lists, in its order; where it does not answer, those bound to the driver in PCI order."""
    devices = bound_devices(raw, pci_vendor=PCI_VENDOR)
    listed = parsed(raw, GMI, parse_table, notes) if devices else None
    bound = [pci for pci, driver in devices.items() if driver in DRIVERS]
    shown = sorted(listed or (), key=lambda g: g.index) or [GpuFacts(NAME, 0, pci=pci) for pci in bound]
    return tuple(
        beside_sysfs(raw, notes.at(f"gpus[{NAME}:{i}]"), replace(gpu, index=i), GMI, told=_TOLD, unread=_UNREAD)
        for i, gpu in enumerate(shown)
    )


def parse_table(text: str) -> tuple[GpuFacts, ...]:
    """`mthreads-gmi` without words: lines of three columns for each GPU. Raises Undetermined when it names none."""
    driver = re.search(r"Driver Version:\s*(\S+)", text)
    found: list[GpuFacts] = []
    for line in text.splitlines():
        if first := _FIRST.match(line):
            found.append(_gpu(first, told(driver.group(1)) if driver else None))
        elif found and found[-1].pcie == Pcie() and (second := _SECOND.search(line)):
            width, most, heat = second.groups()
            link, health = Pcie(width=count(width), max_width=count(most)), Health(temperature_c=number(heat))
            found[-1] = replace(found[-1], pcie=link, health=health)
    if not found:
        raise Undetermined("mthreads-gmi's answer is not the table that was asked for")
    return tuple(found)


def _gpu(line: re.Match[str], driver: str | None) -> GpuFacts:
    index, name, pci, used, total = line.groups()
    whole, held = size(total, unit="MiB") or 0, size(used, unit="MiB") or 0
    return GpuFacts(
        vendor=NAME,
        index=int(index),
        name=told(name.strip()),
        memory_total_bytes=whole or None,
        memory_free_bytes=whole - held if 0 < held <= whole else None,
        pci=pci_address(pci),
        driver=driver,
    )


VENDOR = Vendor(
    name=NAME,
    pci_vendor=PCI_VENDOR,
    drivers=DRIVERS,
    gpus=gpus,
    tools=TOOLS,
    modules="mtgpu",
    libraries="libmccl|libmusart",
    environment=("MUSA", "MCCL"),
    packages=("torch_musa",),
)
