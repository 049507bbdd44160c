"""From GPUs as drivers show them to the cluster's devices: their class, and the NICs nearest to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetctl.comm.contract.cluster import Device
from hetctl.comm.contract.fabrics import NETWORKS
from hetctl.comm.contract.facts import NEARNESS, GpuFacts, HostFacts, Instance
from hetctl.comm.contract.natives import NATIVES
from hetctl.discovery.networks import NetworkPort
from hetctl.trainer.planning.hardware import CLASSES, Hardware

_WHOLE = (None, "none", "disabled", "spx")  # partition modes that leave a GPU in one piece
_UNKNOWN_DISTANCE = len(NEARNESS)


def devices_of(
    facts: HostFacts,
    ports: Sequence[NetworkPort],
    *,
    only: Sequence[int] | None = None,
    table: Hardware = CLASSES,
) -> tuple[tuple[Device, ...], list[str]]:
    """A host's devices with their rails, and what could not be taken, in words. `only` keeps these device numbers."""
    notes: list[str] = []
    found: list[tuple[GpuFacts, Instance | None, str]] = []
    for gpu in facts.gpus:
        known, why = device_class(gpu, table)
        if known is None:
            notes.append(why)
            continue
        if gpu.partition.mode == "mig" and not gpu.partition.instances:
            notes.append(f"GPU {gpu.id} is in MIG mode without any instance: nothing can run on it")
        slices: Sequence[Instance | None] = gpu.partition.instances or ([] if gpu.partition.mode == "mig" else [None])
        found += [(gpu, part, f"{known}/{part.profile}" if part else known) for part in slices]
    mixed = len({gpu.vendor for gpu, _, _ in found}) > 1 or any(part for _, part, _ in found)
    numbered = [(i if mixed else gpu.index, gpu, part, name) for i, (gpu, part, name) in enumerate(found)]
    if only is not None:
        notes += [f"there is no device {n} to use" for n in only if n not in {i for i, *_ in numbered}]
        numbered = [row for row in numbered if row[0] in only]
    rails = assign_rails([gpu for _, gpu, _, _ in numbered], ports)
    rows = zip(numbered, rails, strict=True)
    return tuple(_device(index, gpu, part, name, nics) for (index, gpu, part, name), nics in rows), notes


def foreign_words(facts: HostFacts) -> list[str]:
    """The accelerators of a host that nothing here computes on, a sentence for each product."""
    return [f"{count} x {product}: no back end for it here" for product, count in facts.foreign.items()]


def device_class(gpu: GpuFacts, table: Hardware = CLASSES) -> tuple[str | None, str]:
    """The device class (`h200`, `mi300x/cpx`) of a GPU, or None and why it has none."""
    if gpu.vendor not in NATIVES:
        return None, f"GPU {gpu.id} is of the vendor '{gpu.vendor}', which hetctl has no native library for"
    if gpu.name is None:
        return None, f"GPU {gpu.id} does not say what product it is"
    row = table.of_product(gpu.vendor, gpu.name)
    if row is None:
        return None, f"GPU {gpu.id} is a '{gpu.name}', which is not in the hardware table (hardware.yaml can name it)"
    mode = gpu.partition.mode
    whole = mode in _WHOLE or mode == "mig"  # MIG names its instances, not the GPU
    return row.name if whole else f"{row.name}/{mode}", ""


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


def _device(index: int, gpu: GpuFacts, part: Instance | None, name: str, nics: tuple[str, ...]) -> Device:
    return Device(
        index=index,
        vendor=gpu.vendor,
        device_class=name,
        memory_bytes=part.memory_total_bytes if part else gpu.memory_total_bytes,
        nics=nics,
        uuid=part.uuid if part else gpu.uuid,
        pci=gpu.pci,
        numa_node=gpu.numa_node,
        ordinal=None if index == gpu.index and part is None else gpu.index,
    )
