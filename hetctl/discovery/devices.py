"""From GPUs as drivers show them to the cluster's devices: their class, and the NICs nearest to each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.comm.contract.cluster import Device
from hetctl.comm.contract.device_class import DeviceClass, own_share
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.facts import NEARNESS, GpuFacts, HostFacts, Instance, Process
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.units import GiB, listed, show_bytes
from hetctl.discovery.networks import NetworkPort
from hetctl.trainer.planning.hardware import CLASSES, Hardware

_WHOLE = (None, "none", "disabled", "spx")  # partition modes that leave a GPU in one piece
_UNKNOWN_DISTANCE = len(NEARNESS)
FOREIGN_BYTES = 2 * GiB  # of a process that is no display
DRIVERS_SHARE = 0.05  # of a device's memory, kept by its driver: tests/facts has 0.6 to 4.9 %; plans leave 4 % anyway
USED_STEP = GiB // 4  # what others use changes by the minute, and a plan's cluster is to stay the same


@dataclass(frozen=True)
class FoundDevices:
    """A host's devices, what a person should know of them, and rows for products that the hardware table lacks."""

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    estimated: tuple[DeviceClass, ...] = ()


def devices_of(
    facts: HostFacts, ports: Sequence[NetworkPort], *, only: Sequence[int] | None = None, table: Hardware = CLASSES
) -> FoundDevices:
    """A host's devices with their rails, and what could not be taken, in words. `only` keeps these device numbers."""
    notes = _unusable(facts.gpus)
    found: list[tuple[GpuFacts, Instance | None, DeviceClass]] = []
    for gpu in (g for g in facts.gpus if not g.problem):
        if gpu.vendor not in NATIVES:
            notes.append(f"GPU {gpu.id} is of the vendor '{gpu.vendor}', which hetctl has no native library for")
            continue
        if gpu.partition.mode == "mig" and not gpu.partition.instances:
            notes.append(f"GPU {gpu.id} is in MIG mode without any instance: nothing can run on it")
        slices: Sequence[Instance | None] = gpu.partition.instances or ([] if gpu.partition.mode == "mig" else [None])
        found += [(gpu, part, device_class(gpu, table, part)) for part in slices]
    mixed = len({gpu.vendor for gpu, _, _ in found}) > 1 or any(part for _, part, _ in found)
    numbered = [(i if mixed else gpu.index, gpu, part, row) for i, (gpu, part, row) in enumerate(found)]
    if only is None:
        notes += [_too_small(gpu, row) for _, gpu, _, row in numbered if _for_display(row)]
        only = [i for i, _, _, row in numbered if not _for_display(row)]
    notes += [f"there is no device {n} to use" for n in only if n not in {i for i, *_ in numbered}]
    numbered = [row for row in numbered if row[0] in only]
    rails = assign_rails([gpu for _, gpu, _, _ in numbered], ports)
    rows = zip(numbered, rails, strict=True)
    devices = tuple(_device(index, gpu, part, row.name, nics) for (index, gpu, part, row), nics in rows)
    notes += [_left(device) for device in devices if device.used_bytes]
    return FoundDevices(devices, tuple(notes), tuple(row for *_, row in numbered if row.estimate))


def _left(device: Device) -> str:
    used = f"{show_bytes(device.used_bytes)} of the {show_bytes(device.memory_bytes)}"
    which = f"GPU {device.index} ({device.device_class})"
    return f"{which}: {used} are used by others (a display, another job?), and left to them"


def foreign_words(facts: HostFacts) -> list[str]:
    """The accelerators of a host that nothing here computes on, a sentence for each product."""
    return [f"{count} x {product}: no back end for it here" for product, count in facts.foreign.items()]


def _unusable(gpus: Sequence[GpuFacts]) -> list[str]:
    """Which GPUs nothing can run on: a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.problem:
            by_reason.setdefault(gpu.problem, []).append(f"{gpu.id} ({gpu.pci})")
    return [f"GPU {listed(names, 4)} cannot be used: {why}" for why, names in by_reason.items()]


def device_class(gpu: GpuFacts, table: Hardware = CLASSES, part: Instance | None = None) -> DeviceClass:
    """What a GPU, or an instance of it, computes as: its row, its share of its row, or an estimate of its own name."""
    mode = part.profile if part else gpu.partition.mode
    whole = not part and mode in (*_WHOLE, "mig")  # MIG names its instances, not the GPU
    row = table.of_gpu(gpu.vendor, gpu.names, gpu.pci_id, gpu.subsystem_id)
    known = row if row is None or whole else row.part(mode or "")
    if known is not None:
        return known
    name = "-".join(filter(None, (row.name if row else class_name(gpu), None if whole else mode)))
    memory = _memory(gpu, part)
    said = table.get(name)
    if said and said.vendor != gpu.vendor:
        said, name = None, f"{gpu.vendor}-{name}"  # a class of another vendor is called so
    return said or table.estimated(name, gpu.vendor, memory=memory, architecture=gpu.architecture)


def _for_display(row: DeviceClass) -> bool:
    """Whether a product of no row has hardly more memory than what a rank needs beside a model."""
    return bool(row.estimate) and row.memory_bytes <= 2 * row.runtime_bytes


def _too_small(gpu: GpuFacts, row: DeviceClass) -> str:
    memory = show_bytes(row.memory_bytes)
    return f"GPU {gpu.id} ({row.name}) is left out: of its {memory} a rank needs half for itself (gpus: takes it in)"


def class_name(gpu: GpuFacts) -> str:
    """What to call the class of a product that the hardware table does not have: `geforce-rtx-3050`."""
    told = re.sub(rf"\b{re.escape(gpu.vendor)}\b|\(\w+\)", " ", (gpu.names or ("",))[0].lower())
    words = re.findall(r"[a-z0-9.]+", told) or [
        gpu.vendor,
        *re.findall(r"\w+", gpu.pci_id or gpu.architecture or "gpu"),
    ]
    return "-".join(words)[:40].strip("-")


def assign_rails(gpus: Sequence[GpuFacts], ports: Sequence[NetworkPort]) -> list[tuple[str, ...]]:
    """Per GPU the NICs it drives, nearest first: none used twice where there are enough, leftovers shared out."""
    usable = rail_ports(ports)
    if not gpus or not usable:
        return [() for _ in gpus]
    share = -(-len(gpus) // len(usable))  # GPUs per NIC where there are too few
    chosen: list[list[str]] = [[] for _ in gpus]
    load = dict.fromkeys((p.facts.name for p in usable), 0)
    names = {p.facts.name: p.facts.netdev or p.facts.name for p in usable}
    distances = _distances(gpus, usable)
    for _, g, name in distances:
        if not chosen[g] and load[name] < share:
            chosen[g].append(names[name])
            load[name] += 1
    most = -(-len(usable) // len(gpus))
    for _, g, name in distances:
        if not load[name] and len(chosen[g]) < most:
            chosen[g].append(names[name])
            load[name] += 1
    return [tuple(nics) for nics in chosen]


def rail_ports(ports: Sequence[NetworkPort]) -> list[NetworkPort]:
    """The ports worth being rails: RDMA before plain Ethernet, none slower than half the fastest."""
    reaching = [p for p in ports if p.key is not None]
    pool = [p for p in reaching if NETWORKS[p.kind].verbs or NETWORKS[p.kind].plugin] or reaching
    fastest = max((p.facts.rate_bytes_per_s or 0.0 for p in pool), default=0.0)
    return [p for p in pool if p.facts.rate_bytes_per_s is None or p.facts.rate_bytes_per_s * 2 >= fastest]


def _distances(gpus: Sequence[GpuFacts], ports: Sequence[NetworkPort]) -> list[tuple[int, int, str]]:
    """(distance, GPU position, NIC name) of every pair, nearest first; equals in the order both are listed."""
    rows = []
    for g, gpu in enumerate(gpus):
        reach: Mapping[str, int] = {r.to: NEARNESS.index(r.path) for r in gpu.nics}
        for n, port in enumerate(ports):
            distance = reach.get(port.facts.name, _by_numa(gpu.numa_node, port.facts.numa_node))
            # among equals, GPU i prefers NIC i: on symmetric hosts this is how they are wired
            rows.append((distance, (n - g) % len(ports), g, port.facts.name))
    return [(distance, g, name) for distance, _, g, name in sorted(rows)]


def _by_numa(gpu: int | None, nic: int | None) -> int:
    if gpu is None or nic is None:
        return _UNKNOWN_DISTANCE
    return NEARNESS.index("node") if gpu == nic else NEARNESS.index("sys")


def _memory(gpu: GpuFacts, part: Instance | None) -> int | None:
    """Of a device, in bytes: what it does not share with others."""
    if part is None or part.memory_total_bytes is None:
        return gpu.memory_total_bytes if part is None else None
    return int(part.memory_total_bytes * own_share(part.profile or ""))


def _used(gpu: GpuFacts, part: Instance | None) -> int | None:
    """Bytes that others use and will go on using, in steps: a display, a browser. Large processes are not meant: the
    doctor names them, to be ended."""
    total, free = gpu.memory_total_bytes, gpu.memory_free_bytes
    if part is not None or total is None or free is None:
        return None
    used = total - free - sum(p.memory_bytes for p in gpu.processes or () if p.memory_bytes and large(p))
    return None if used <= DRIVERS_SHARE * total else -(-used // USED_STEP) * USED_STEP


def large(process: Process) -> bool:
    """Whether training cannot do beside it."""
    return (process.memory_bytes or 0) >= FOREIGN_BYTES


def _device(index: int, gpu: GpuFacts, part: Instance | None, name: str, nics: tuple[str, ...]) -> Device:
    return Device(
        index=index,
        vendor=gpu.vendor,
        device_class=name,
        memory_bytes=_memory(gpu, part),
        nics=nics,
        uuid=part.uuid if part else gpu.uuid,
        pci=gpu.pci,
        numa_node=gpu.numa_node,
        ordinal=None if index == gpu.index and part is None else gpu.index,
        used_bytes=_used(gpu, part),
    )
