"""What a vendor's file provides: one Vendor value, and below it one parser per source of that vendor's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.facts import GpuFacts, Pcie, Reach
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI
from hetctl.probe.words import gt_per_s, integer, node, told

T = TypeVar("T")
DISPLAY = ("0x03", "0x12")  # PCI classes: display controllers, processing accelerators
COMPUTING = (*DISPLAY, "0x0b40")  # and co-processors


@dataclass(frozen=True)
class Tool:
    """A command the probe runs. `instead_of` names the tool that it replaces when that one gave no answer."""

    argv: tuple[str, ...]
    instead_of: str = ""
    keep: str = ""  # only output lines in which this pattern is found
    # once for each file of this pattern whose content begins so; {4} in argv is the fourth word of its path
    each: tuple[str, str] | None = None


@dataclass(frozen=True)
class Vendor:
    """One vendor of accelerators as the probe knows it. Patterns are regular expressions joined by the program."""

    name: str
    pci_vendor: str  # as /sys/bus/pci/devices/*/vendor writes it
    drivers: tuple[str, ...]  # the kernel drivers that make its devices usable
    gpus: Callable[[Raw, Notes], tuple[GpuFacts, ...]]
    tools: Mapping[str, Tool]
    # what its devices reach each other over, beyond what the PCI tree tells
    links: Callable[[Raw, tuple[GpuFacts, ...]], Mapping[tuple[str, str], Reach]] = lambda raw, gpus: {}
    # why its driver exports no dma-buf, None when nothing is known
    dma_buf_blocker: Callable[[Raw], str | None] = lambda raw: None
    pci_classes: tuple[str, ...] = DISPLAY  # beginnings of the PCI classes of its devices
    integrated: tuple[str, ...] = ()  # PCI addresses of graphics that are part of a processor
    tool_path: tuple[str, ...] = ()  # where its tools live when PATH does not say
    files: tuple[str, ...] = ()
    pci_files: tuple[str, ...] = ()  # what its driver adds to /sys/bus/pci/devices/*
    trees: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # folder -> files of every entry
    modules: str = ""  # kernel modules of interest
    peer_memory: tuple[str, ...] = ()  # modules through which NICs reach its memory
    libraries: str = ""  # shared libraries of interest
    environment: tuple[str, ...] = ()  # beginnings of its variables' names
    packages: tuple[str, ...] = ()
    # the same devices as a tool tells them that `gpus` does not need, and what it says: to check discovery itself
    opinion_tools: Mapping[str, Tool] = field(default_factory=dict)
    opinion: Callable[[Raw], tuple[GpuFacts, ...]] | None = None
    kernel_log: str = ""  # lines of its driver in the kernel's log that mean trouble


def bound_devices(
    raw: Raw, *, pci_vendor: str, ignored: tuple[str, ...] = (), classes: tuple[str, ...] = DISPLAY
) -> dict[str, str | None]:
    """PCI address -> bound kernel driver (None: none) of a vendor's display and accelerator devices, in PCI order."""
    found: dict[str, str | None] = {}
    for path, content in raw.files.items():
        folder, _, file = path.rpartition("/")
        if file != "vendor" or not folder.startswith(PCI) or content.strip().lower() != pci_vendor:
            continue
        if folder[len(PCI) :] in ignored:
            continue
        if (raw.text(folder + "/class") or "").startswith(classes):
            driver = raw.links.get(folder + "/driver", "").rpartition("/")[2]
            found[folder[len(PCI) :]] = driver or None
    return dict(sorted(found.items()))


def warn_of_hidden(notes: Notes, bound: Sequence[str], shown: Sequence[GpuFacts], tool: str) -> None:
    """Say which GPUs have a driver and are yet not among those that a vendor's tool or driver lists."""
    hidden = sorted(set(bound) - {g.pci for g in shown})
    if hidden:
        notes.warn(
            f"sysfs shows {len(hidden)} GPU(s) that {tool} does not ({', '.join(hidden[:16])}):"
            " hidden from this container, or fallen off the bus"
        )


def physical(raw: Raw, pci: str | None) -> str | None:
    """The PCI function that is there: partitions of a package count on from function 0."""
    if not pci or raw.text(f"{PCI}{pci}/vendor") or not raw.text(f"{PCI}{pci[:-1]}0/vendor"):
        return pci
    return pci[:-1] + "0"


def beside_sysfs(
    raw: Raw, notes: Notes, gpu: GpuFacts, tool: str, *, told: Sequence[str], unread: Sequence[str]
) -> GpuFacts:
    """A GPU as only its vendor's tool tells it, with its slot from sysfs.

    `told`: what the tool may tell; `unread`: what nobody is asked.
    """
    notes.pick_each(told, (gpu, tool))
    for name in unread:
        notes.why(name, "not read for this vendor")
    numa = notes.pick("numa_node", (node(raw.text(f"{PCI}{gpu.pci}/numa_node")), "sysfs"))
    return replace(gpu, numa_node=numa, pcie=pcie_of(notes, (sysfs_pcie(raw, gpu.pci), "sysfs"), (gpu.pcie, tool)))


def sysfs_pcie(raw: Raw, pci: str | None) -> Pcie:
    """The PCIe link of a device as sysfs shows it; a link that is down reads width 0 or 63, which is no width."""
    base = PCI + (pci or "none")
    return Pcie(
        width=_width(raw.text(base + "/current_link_width")),
        max_width=_width(raw.text(base + "/max_link_width")),
        speed_gt_per_s=gt_per_s(raw.text(base + "/current_link_speed")),
        max_speed_gt_per_s=gt_per_s(raw.text(base + "/max_link_speed")),
    )


def pcie_of(notes: Notes, *offers: tuple[Pcie, str]) -> Pcie:
    """A device's PCIe link, each figure from the most trusted source that tells it."""
    return Pcie(**notes.at("pcie").pick_each((f.name for f in fields(Pcie)), *offers))


def parsed(
    raw: Raw, tool: str, parse: Callable[[str], T], notes: Notes, *, name: str = "", strict: bool = True
) -> T | None:
    """What a tool said, parsed; None, with a warning about `name` (else the tool), where it gave no answer.

    What it printed before it failed is an answer if it is whole, which is said, unless `strict`.
    """
    output = raw.tool(tool)
    said = output.problem or told(output.stderr.strip()[-200:] or output.stdout.strip()[-200:])
    said = said or f"exit code {output.exit_code}"
    try:
        if output.stdout.strip() and (output.ok or not strict):
            answer = parse(output.stdout)
            if not output.ok:
                why = output.problem or f"exit code {output.exit_code} {output.stderr.strip()[-200:]}".strip()
                notes.warn(f"{name or tool} failed ({why}), but its answer is whole")
            return answer
        notes.warn(f"{name or tool} gave no answer: {said}")
    except Undetermined as error:
        notes.warn(error.message if output.ok else f"{name or tool} gave no answer: {said}")
    return None


def _width(text: str | None) -> int | None:
    found = integer(text)
    return found if found and 0 < found <= 32 else None
