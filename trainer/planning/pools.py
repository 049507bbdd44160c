"""Pools: the cluster as the planner sees it, devices of one island that compute alike, with their rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from math import inf

from hetctl.comm.contract.cluster import Cluster, Device, Host, Member
from hetctl.comm.contract.device_class import DeviceClass, Precision
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.natives import HOST
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.roofline import matmul_flops_per_s

PRECISION_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
# of a port's rate, what a native library's messages and sums get: Sailor measured 22.9 of 25, 2.86 of 3.125 and
# 0.115 of 0.125 GB/s between nodes (tests/published/sailor-*.yaml)
PORT_REACHED = 0.92
# of what messages get, what collectives across hosts do: each step of a ring waits for the slowest host, and adds.
# Fitted to the fitted half of all of tests/published that has several hosts
RING_REACHED = 0.65
HOST_USABLE_SHARE = 0.9  # of a host's memory: its system and file cache need the rest
HOST_PROCESS_BYTES = 4 * GiB  # of a rank, whatever it trains: torch, the driver's context, the bridge's pinned slots


@dataclass(frozen=True, eq=False)
class Rates:
    """What one device does per second, speed already applied, and how much memory it has.

    Told apart by identity (they are keys of large tables): equal devices share one object.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    native_bytes_per_s: float  # inside a host
    nic_bytes_per_s: float  # this device's share of its host's NICs
    host_bytes_per_s: float
    launch_s: float
    memory_bytes: int
    runtime_bytes: int
    base: str = ""  # the class whose measured profile holds, '' when a speed was given by hand
    speed: float = 1.0  # the share of that profile's speed
    peak_flops_per_s: float = 0.0  # 0: unknown
    matmul_flops_per_s: float = 0.0  # in matrix products alone; 0: flops_per_s is of this very model, or a guess
    host_memory_bytes: float = inf  # this device's share of what its host has left for training; inf: unknown
    host_devices: int = 1  # that share the host's cores and memory bandwidth

    def least(self, others: Iterable[Rates]) -> Rates:
        """These rates with every rate and the memory lowered to the least of all."""
        every = [self, *others]
        names = [f.name for f in fields(self) if f.name.endswith(("_per_s", "memory_bytes"))]
        most = max(r.runtime_bytes for r in every)
        return replace(self, runtime_bytes=most, **{n: min(getattr(r, n) for r in every) for n in names})


@dataclass(frozen=True, eq=False)
class Pool:
    """Devices of one island that compute alike. `hosts` are the ranks of each host, in rank order.

    Pools are told apart by identity: comparing thousands of ranks would dominate the search.
    """

    island: str
    device_class: str
    speed: float
    rates: Rates
    hosts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for host in self.hosts for rank in host)

    @cached_property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    @cached_property
    def per_host(self) -> int:
        """Devices on the fullest host."""
        return max(len(host) for host in self.hosts)

    def units(self, tensor: int) -> int:
        """How many tensor groups of this degree its hosts can form."""
        return sum(count * (size // tensor) for size, count in self._host_sizes.items())

    @cached_property
    def _host_sizes(self) -> Counter[int]:
        return Counter(len(host) for host in self.hosts)

    @property
    def name(self) -> str:
        return self.island if self.island == self.device_class else f"{self.island}/{self.device_class}"


def seats(cluster: Cluster) -> Iterator[tuple[int, str, Member, Device]]:
    """(rank, island name, member, device) of every device: ranks count through the islands in order."""
    placed = ((island.name, member) for island in cluster.islands for member in island.members)
    for rank, (island, member) in enumerate(placed):
        yield rank, island, member, cluster.device(member)


def read_pools(
    cluster: Cluster, *, speeds: Mapping[str, float] | None = None, precision: Precision = "bf16"
) -> tuple[Pool, ...]:
    """The pools of a cluster, in order of its islands. `speeds`: sustained TFLOPS per GPU of a class, as they are.

    Raises ConfigError for a speed of a class that the cluster does not have, and for unknown classes.
    """
    speeds = speeds or {}
    present = {d.device_class for h in cluster.hosts for d in h.devices}
    for name in speeds:
        if name not in present:
            raise ConfigError(f"--speed names '{name}', which this cluster does not have", hint=nearest(name, present))
    found: dict[tuple[str, str, float, int], tuple[Rates, list[tuple[str, int]]]] = {}
    rates_of: dict[tuple[str, str, str, float, int | None], Rates] = {}
    fabrics = {island.name: island.fabric for island in cluster.islands}
    equal: dict[tuple[object, ...], Rates] = {}
    for rank, island, member, device in seats(cluster):
        host = cluster.host_by_name[member.host]
        known = (member.host, island, device.device_class, device.speed, device.room_bytes)
        if known not in rates_of:
            made = _rates(cluster, host, fabrics[island], device, speeds, precision)
            rates_of[known] = equal.setdefault(tuple(vars(made).values()), made)
        rates = rates_of[known]
        key = (island, device.device_class, device.speed, rates.memory_bytes)
        first, placed = found.setdefault(key, (rates, []))
        if rates.host_memory_bytes < first.host_memory_bytes:  # hosts that differ in it alone are one pool
            found[key] = (rates, placed)
        placed.append((member.host, rank))
    pools = []
    for (island, device_class, speed, _), (rates, placed) in found.items():
        hosts = tuple(tuple(rank for _, rank in group) for _, group in groupby(placed, key=lambda p: p[0]))
        pools.append(Pool(island, device_class, speed, rates, hosts))
    return tuple(pools)


def base_class(cluster: Cluster, label: str) -> DeviceClass:
    """The table's row behind a label: the label's own, or on an emulated cluster this machine's device.

    Labels of an emulated cluster decide islands, never speed; CPUs are what they are called.
    """
    name = label
    if cluster.source == "emulated" and label != HOST:
        fallback = "cpu" if cluster.runs == "gloo" else cluster.hosts[0].devices[0].device_class
        name = cluster.runs_class or fallback
    return CLASSES.with_own(cluster.classes)[name]


def _share_of_host(host: Host, row: DeviceClass) -> float:
    """What of its host's memory a device's rank may fill; CPU slots are that memory themselves."""
    if host.memory_bytes is None or row.name == "cpu":
        return inf
    return max(0.0, HOST_USABLE_SHARE * host.memory_bytes / len(host.devices) - HOST_PROCESS_BYTES)


def _rates(
    cluster: Cluster, host: Host, fabric: str, device: Device, speeds: Mapping[str, float], precision: Precision
) -> Rates:
    label, speed, memory = device.device_class, device.speed, device.room_bytes
    row = base_class(cluster, label)
    tflops = speeds.get(label, row.sustained_in(precision)) * speed
    known = [n for n in host.nics if n.rate_bytes_per_s]
    nics = [n.rate_bytes_per_s or 0.0 for n in known if n.network == fabric or fabric == "host"]
    whole = label in speeds or row.name == "cpu"  # its figure is a guess
    matmul = 0.0
    if not whole:
        matmul = matmul_flops_per_s(tflops * 1e12, row.memory_bytes_per_s * speed, PRECISION_BYTES[precision])
    share = PORT_REACHED * (sum(nics) / max(1, len(host.devices)) if nics else row.nic_bytes_per_s)
    return Rates(
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=row.memory_bytes_per_s,
        native_bytes_per_s=row.native_bytes_per_s,
        nic_bytes_per_s=share,
        host_bytes_per_s=row.host_bytes_per_s,
        # a speed given by hand is all a device sustains, launches included; a slower emulation launches more slowly
        launch_s=0.0 if label in speeds else row.launch_s / speed,
        memory_bytes=row.memory_bytes if memory is None else memory,
        runtime_bytes=row.runtime_bytes,
        base="" if label in speeds else row.name,
        speed=speed,
        peak_flops_per_s=row.peak_in(precision) * 1e12,
        matmul_flops_per_s=matmul,
        host_memory_bytes=_share_of_host(host, row),
        host_devices=len(host.devices),
    )
