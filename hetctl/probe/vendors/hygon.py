"""Hygon DCUs: KFD's topology and sysfs, as their driver took them over from AMD's, then `hy-smi --json`.

Written from published outputs and sources (docs/adding-a-vendor.md names them); never run on one.
"""

from __future__ import annotations

from dataclasses import replace

from hetctl.comm.contract.facts import GpuFacts
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI
from hetctl.probe.vendors.amd_smi import KFD, KfdNode, kfd_nodes, parse_rocm_smi
from hetctl.probe.vendors.base import COMPUTING, Tool, Vendor, bound_devices, parsed, pcie_of, sysfs_pcie
from hetctl.probe.words import count, node, told

NAME, PCI_VENDOR, DRIVERS = "hygon", "0x1d94", ("hydcu", "hycu")
SMI = "hy-smi"
_WORDS = ("--showproductname", "--showuniqueid", "--showserial", "--showdriverversion", "--showvbios")
TOOLS = {SMI: Tool((SMI, *_WORDS, "--showmeminfo", "vram", "--json"))}


def gpus(raw: Raw, notes: Notes) -> tuple[GpuFacts, ...]:
    """Every DCU in KFD's order, which is HIP's; as hy-smi lists them, else in PCI order, where KFD cannot be read."""
    devices = bound_devices(raw, pci_vendor=PCI_VENDOR, classes=COMPUTING)
    bound = [pci for pci, driver in devices.items() if driver in DRIVERS]
    nodes = kfd_nodes(raw, pci_vendor=PCI_VENDOR)
    cards = (parsed(raw, SMI, parse_smi, notes, strict=False) or ()) if nodes or bound else ()
    shown = nodes or [KfdNode(-1, pci=pci) for pci in (c.pci for c in cards)] or [KfdNode(-1, pci=p) for p in bound]
    placed = cards if len(cards) == len(shown) else ()
    by_uuid: dict[str | None, GpuFacts] = {card.uuid: card for card in cards if card.uuid}
    pairs = [(n, by_uuid.get(n.uuid) or (None if n.uuid or not placed else placed[i])) for i, n in enumerate(shown)]
    return tuple(_merge(raw, notes.at(f"gpus[{NAME}:{i}]"), i, n, card) for i, (n, card) in enumerate(pairs))


def parse_smi(text: str) -> tuple[GpuFacts, ...]:
    """`hy-smi --json`, which is rocm-smi's answer with memory in MiB. Raises Undetermined when it holds no card."""
    return tuple(replace(card, vendor=NAME, pci_id=None) for card in parse_rocm_smi(text, makers=""))


def _merge(raw: Raw, notes: Notes, index: int, known: KfdNode, card: GpuFacts | None) -> GpuFacts:
    """One DCU from KFD and sysfs where they tell, else from the card with its unique id or (without ids) its place."""
    base, card = f"{PCI}{known.pci}", card or GpuFacts(NAME, index)
    sysfs = GpuFacts(
        NAME,
        index,
        memory_total_bytes=count(raw.text(base + "/mem_info_vram_total")) or None,
        numa_node=node(raw.text(base + "/numa_node")),
        driver=told(raw.text("/sys/module/hycu/version")) or told(raw.text("/sys/module/hydcu/version")),
    )
    offers = (sysfs, "sysfs"), (card, SMI)
    notes.why("memory_free_bytes", "not read for this vendor")
    return GpuFacts(
        NAME,
        index,
        pci=known.pci or card.pci,
        architecture=notes.pick("architecture", (known.architecture, KFD)),
        **notes.pick_each(("memory_total_bytes", "uuid"), (known, KFD), *offers),
        **notes.pick_each(("name", "serial", "numa_node", "driver", "firmware"), *offers),
        pcie=pcie_of(notes, (sysfs_pcie(raw, known.pci), "sysfs")),
    )


VENDOR = Vendor(
    name=NAME,
    pci_vendor=PCI_VENDOR,
    drivers=DRIVERS,
    gpus=gpus,
    tools=TOOLS,
    pci_classes=COMPUTING,  # its CPUs' other functions have the same PCI vendor
    tool_path=("/opt/hyhal/bin", "/opt/dtk/bin"),
    files=("/sys/module/hycu/version", "/sys/module/hydcu/version"),  # and what AMD's file asks for
    modules="hycu|hydcu",
    environment=("HYHAL",),
)
