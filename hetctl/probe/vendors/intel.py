"""Intel GPUs: sysfs first, then `xpu-smi discovery --dump`. The worked example of docs/adding-a-vendor.md."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.facts import GpuFacts, Pcie
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.vendors.base import Tool, Vendor, beside_sysfs, bound_devices, parsed, warn_of_hidden
from hetctl.probe.words import PCIE_GENERATIONS, count, pci_address, serial, size, told, whole_lines

NAME, PCI_VENDOR, DRIVERS = "intel", "0x8086", ("xe", "i915")
CLASSES = ("0x03",)  # its accelerators of class 0x12 are processors' NPUs and FPGAs
INTEGRATED = ("0000:00:02.0",)  # where every processor's own graphics sits
DUMP = "xpu-smi discovery"
# Device ID, name, SOC UUID, serial, driver, firmware, PCI address, PCIe generation and width, memory
TOOLS = {DUMP: Tool(("xpu-smi", "discovery", "--dump", "1,2,4,5,8,9,11,13,14,16"))}
_TOLD = ("name", "memory_total_bytes", "uuid", "serial", "driver", "firmware")
_UNREAD = ("memory_free_bytes", "architecture", "processes")


def gpus(raw: Raw, notes: Notes) -> tuple[GpuFacts, ...]:
    """Every discrete GPU, in the order of xpu-smi, which is Level Zero's; in PCI order where it does not answer."""
    devices = bound_devices(raw, pci_vendor=PCI_VENDOR, ignored=INTEGRATED, classes=CLASSES)
    bound = [pci for pci, driver in devices.items() if driver in DRIVERS]
    told_by_tool = parsed(raw, DUMP, parse_dump, notes, name="xpu-smi", strict=False) if bound else None
    shown = sorted(told_by_tool or (), key=lambda g: g.index)
    shown = shown or [GpuFacts(NAME, index, pci=pci) for index, pci in enumerate(bound)]
    warn_of_hidden(notes, bound, shown, "xpu-smi")
    return tuple(
        beside_sysfs(raw, notes.at(f"gpus[{NAME}:{i}]"), replace(gpu, index=i), DUMP, told=_TOLD, unread=_UNREAD)
        for i, gpu in enumerate(shown)
    )


def parse_dump(text: str) -> tuple[GpuFacts, ...]:
    """`xpu-smi discovery --dump`: CSV whose header names the columns. Raises Undetermined when it is none."""
    try:
        rows = list(csv.DictReader(whole_lines(text), skipinitialspace=True))
    except csv.Error:
        raise Undetermined("xpu-smi's table cannot be parsed") from None
    if not rows or "Device ID" not in rows[0]:
        raise Undetermined("xpu-smi's answer is not the table that was asked for")
    return tuple(_gpu(row, index) for index, row in enumerate(rows))


def _gpu(row: Mapping[str, object], index: int) -> GpuFacts:
    position = count(row.get("Device ID"))
    return GpuFacts(
        vendor=NAME,
        index=index if position is None else position,
        name=told(row.get("Device Name")),
        memory_total_bytes=size(row.get("Memory Physical Size"), unit="MiB") or None,
        uuid=told(row.get("SOC UUID")),
        serial=serial(row.get("Serial Number")),
        pci=pci_address(row.get("PCI BDF Address")),
        pcie=Pcie(
            max_width=count(row.get("PCIe Max Link Width")) or None,
            max_speed_gt_per_s=PCIE_GENERATIONS.get(count(row.get("PCIe Generation")) or 0),
        ),
        driver=told(row.get("Driver Version")),
        firmware=told(row.get("GFX Firmware Version")),
    )


VENDOR = Vendor(
    name=NAME,
    pci_vendor=PCI_VENDOR,
    drivers=DRIVERS,
    gpus=gpus,
    tools=TOOLS,
    integrated=INTEGRATED,
    pci_classes=CLASSES,
    modules="xe|i915",
    libraries="libccl|libze_loader",
    environment=("CCL_", "ZE_", "SYCL"),
    packages=("intel_extension_for_pytorch", "oneccl", "oneccl_bind_pt"),
)
