"""Raw material of one host to HostFacts: every parser in turn, distances between what they found, and all notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hetctl.comm.contract.facts import GpuFacts, HostFacts, NicFacts, Reach
from hetctl.comm.contract.values import decode, encode
from hetctl.probe.nics import nics
from hetctl.probe.notes import Notes, compact
from hetctl.probe.raw import Raw, printable
from hetctl.probe.rdma import modules, rdma
from hetctl.probe.software import containers, interpreters
from hetctl.probe.system import limits, system
from hetctl.probe.topology import PCI, branch, distance, nearest_first
from hetctl.probe.vendors import VENDORS
from hetctl.probe.vendors.base import Vendor, bound_devices, physical
from hetctl.probe.vendors.foreign import foreign
from hetctl.probe.words import pci_id

_TEXT_LIMIT = 4096
# Other failures are ordinary: an interface that is down has no speed to read.
_REFUSALS = ("Permission denied", "Operation not permitted", "Input/output error", "too large for the answer")


def parse(raw: Raw) -> HostFacts:
    """The facts in raw material. A strange host gives unknowns with reasons, never an exception."""
    notes = Notes()
    ports = nics(raw, notes)
    gpus, states = _gpus(raw, ports, notes)
    pythons = interpreters(raw, notes)
    facts = HostFacts(
        system=system(raw, notes.at("system")),
        gpus=gpus,
        nics=ports,
        rdma=rdma(raw, notes.at("rdma")),
        interpreters=pythons,
        containers=containers(raw, notes),
        limits=limits(raw),
        vendors=states,
        foreign=foreign(raw),
        warnings=tuple(notes.warnings + [f"probe: {problem}" for problem in raw.problems]),
    )
    lengths = {"gpus": len(gpus), "nics": len(ports), "interpreters": len(pythons)}
    numbered = {gpu.id: i for i, gpu in enumerate(gpus)}
    sources, unknown = (compact(_numbered(n, numbered), lengths) for n in (notes.sources, notes.unknown))
    refused = {path: f"the host said: {why}" for path, why in raw.failed.items() if why in _REFUSALS}
    unknown = {**unknown, **refused}
    return _clean(replace(facts, sources=sources, unknown=unknown))


def _gpus(raw: Raw, ports: tuple[NicFacts, ...], notes: Notes) -> tuple[tuple[GpuFacts, ...], dict[str, str]]:
    """The GPUs of every vendor present, with their distances, and per vendor whether it is present."""
    found: list[GpuFacts] = []
    native: dict[tuple[str, str], Reach] = {}
    states = {}
    for vendor in VENDORS:
        theirs = vendor.gpus(raw, notes)
        native.update(vendor.links(raw, theirs))
        found += theirs
        states[vendor.name] = _state(raw, vendor, theirs, notes)
    if not found:
        _unseen(raw, notes)
    branches = {g.id: branch(raw.links, g.pci or "") for g in found}
    branches.update((n.name, branch(raw.links, n.pci or "")) for n in ports)
    return tuple(_with_distances(_identified(g, raw), found, ports, native, branches) for g in found), states


def _unseen(raw: Raw, notes: Notes) -> None:
    """GPUs of which no tool tells and no PCI id: a Jetson's, and what Windows lends to its Linux."""
    if "nvgpu" in modules(raw):
        notes.warn("the kernel drives a Jetson's GPU (nvgpu), and no nvidia-smi tells of it: it cannot be used here")
    lent = [pci for pci in bound_devices(raw, pci_vendor="0x1414") if raw.text(f"{PCI}{pci}/device") == "0x008e"]
    if lent:
        notes.warn(
            f"there is a GPU of Windows' (WSL, {', '.join(lent)}), and no tool tells of it: it cannot be used here"
        )


def _identified(gpu: GpuFacts, raw: Raw) -> GpuFacts:
    """With the PCI ids that sysfs tells, which no tool words otherwise; a partition has its package's."""
    base = f"{PCI}{physical(raw, gpu.pci)}"
    own, board = (pci_id(raw.text(f"{base}/{of}vendor"), raw.text(f"{base}/{of}device")) for of in ("", "subsystem_"))
    return replace(gpu, pci_id=own or gpu.pci_id, subsystem_id=board or gpu.subsystem_id)


def _state(raw: Raw, vendor: Vendor, gpus: tuple[GpuFacts, ...], notes: Notes) -> str:
    drivers = bound_devices(raw, pci_vendor=vendor.pci_vendor, ignored=vendor.integrated, classes=vendor.pci_classes)
    if gpus:
        drivers = {pci: driver for pci, driver in drivers.items() if driver not in vendor.drivers}
    names = ", ".join(sorted({driver or "no driver" for driver in drivers.values()}))
    if not gpus:
        return f"{len(drivers)} on the PCI bus, none usable: bound to {names}" if drivers else "absent"
    if drivers:
        places = ", ".join(list(drivers)[:16])
        notes.warn(f"{vendor.name}: {len(drivers)} GPU(s) beside these cannot be used: bound to {names} ({places})")
    return "present"


def _with_distances(
    gpu: GpuFacts,
    gpus: list[GpuFacts],
    ports: tuple[NicFacts, ...],
    native: Mapping[tuple[str, str], Reach],
    branches: Mapping[str, tuple[str, ...]],
) -> GpuFacts:
    """NVLink or xGMI as the vendor tells; PCIe distance as sysfs tells, as the vendor's tool tells where it cannot."""
    peers, near = [], []
    for peer in gpus:
        told = native.get((gpu.id, peer.id))
        path = distance(branches[gpu.id], branches[peer.id], (gpu.numa_node, peer.numa_node))
        if peer.id != gpu.id and (told or path):
            direct = told is not None and told.path in ("nvlink", "xgmi")
            peers.append(told if told and (direct or path is None) else Reach(peer.id, path or "sys"))
    for port in ports:
        if port.virtual and not port.rdma_device:
            continue
        told = native.get((gpu.id, port.rdma_device or ""))
        path = distance(branches[gpu.id], branches[port.name], (gpu.numa_node, port.numa_node))
        if path or told:
            near.append(Reach(port.name, path or (told.path if told else "sys")))
    return replace(gpu, gpus=nearest_first(peers), nics=nearest_first(near))


def _numbered(notes: Mapping[str, str], numbers: Mapping[str, int]) -> dict[str, str]:
    """`gpus[<id>].x` as `gpus[<position>].x`."""

    def position(match: re.Match[str]) -> str:
        return f"gpus[{numbers.get(match.group(1), match.group(1))}]"

    return {re.sub(r"^gpus\[([a-z]+:\d+)\]", position, path): text for path, text in notes.items()}


def _clean(facts: HostFacts) -> HostFacts:
    """The same facts with every text fit to be shown: no terminal escapes, no control characters, no endless lines."""
    return decode(HostFacts, _cleaned(encode(facts)), where="facts")


def _cleaned(data: object) -> object:
    if isinstance(data, str):
        return printable(data, limit=_TEXT_LIMIT)
    if isinstance(data, dict):
        return {printable(k, limit=_TEXT_LIMIT): _cleaned(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_cleaned(v) for v in data]
    return data
