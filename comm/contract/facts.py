"""What a probe read on one host, as frozen plain values: the contract between probing, fabric, plan and doctor.

None means unknown, never zero or absent. `HostFacts.sources` says where each value came from and `HostFacts.unknown`
why a value is None; both are keyed by path (`gpus[0].uuid`, or `gpus[*].uuid` where all entries agree).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hetctl.comm.contract.fabric_facts import FabricReport, PortFabric
from hetctl.comm.contract.values import decode, encode

Near = Literal["nvlink", "xgmi", "pix", "pxb", "phb", "node", "sys"]
NEARNESS: tuple[Near, ...] = ("nvlink", "xgmi", "pix", "pxb", "phb", "node", "sys")  # nearest first
LinkLayer = Literal["infiniband", "ethernet"]
GidType = Literal["ib", "roce_v1", "roce_v2"]
Bytes = int | Literal["unlimited"]


@dataclass(frozen=True)
class Reach:
    """How near one device is to another on the same host."""

    to: str  # GpuFacts.id or NicFacts.name
    path: Near
    lanes: int | None = None  # bonded links of that kind, e.g. 18 for NV18


@dataclass(frozen=True)
class Pcie:
    """A PCIe link. Speed drops while idle, width does not: compare widths."""

    width: int | None = None
    max_width: int | None = None
    speed_gt_per_s: float | None = None
    max_speed_gt_per_s: float | None = None


@dataclass(frozen=True)
class Process:
    """A process that holds device memory. The pid is the host's; inside a container it may be unresolvable."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Instance:
    """One slice of a GPU that the runtime offers as a device of its own (a MIG instance)."""

    profile: str | None = None  # e.g. 3g.71gb
    uuid: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True)
class Partition:
    """How a GPU is divided. `mode` is the vendor's word: mig / none, spx, cpx ...; `memory_mode` nps1, nps4 ..."""

    mode: str | None = None
    memory_mode: str | None = None
    pending_mode: str | None = None  # takes effect after a reset
    instances: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class Health:
    """Counters and states that say whether a GPU can be trusted. Counts are since the driver was loaded."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_pending: bool | None = None  # remapped rows or retired pages wait for a reset
    remap_failed: bool | None = None
    recovery_action: str | None = None  # the driver's own advice, 'none' when healthy
    throttle_reasons: tuple[str, ...] | None = None  # active now, idle excluded
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    pcie_replays: int | None = None
    links_up: int | None = None  # NVLink or xGMI links that are active
    links_down: int | None = None
    fabric_state: str | None = None  # of an NVLink/NVSwitch fabric that must be registered before use


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as its driver shows it. `index` counts per vendor in PCI order (as CUDA_DEVICE_ORDER=PCI_BUS_ID does)."""

    vendor: str
    index: int
    name: str | None = None  # the product's, e.g. NVIDIA H200
    other_names: tuple[str, ...] | None = None  # that its tools have for it as well: of the board, of the series
    pci_id: str | None = None  # vendor:device, e.g. 10de:2335
    subsystem_id: str | None = None  # of the board, likewise
    architecture: str | None = None  # sm_90, gfx942
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    uuid: str | None = None
    serial: str | None = None
    pci: str | None = None  # 0000:18:00.0, lower case
    numa_node: int | None = None
    pcie: Pcie = Pcie()
    partition: Partition = Partition()
    driver: str | None = None
    firmware: str | None = None  # VBIOS or IFWI
    ecc_enabled: bool | None = None
    health: Health = Health()
    processes: tuple[Process, ...] | None = None
    problem: str | None = None  # why nothing can run on it, in the words of its driver or tool
    gpus: tuple[Reach, ...] = ()  # to the other GPUs of this host, nearest first
    nics: tuple[Reach, ...] = ()  # to the NICs of this host, nearest first

    @property
    def id(self) -> str:
        """The word by which Reach.to names this GPU, unique on its host."""
        return f"{self.vendor}:{self.index}"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it goes by."""
        return tuple(filter(None, (self.name, *(self.other_names or ()))))


@dataclass(frozen=True)
class Address:
    """An IP address of a network interface."""

    ip: str
    prefix: int | None = None
    scope: str | None = None  # global, link, host


@dataclass(frozen=True)
class Gid:
    """One valid (non-zero) entry of a port's GID table, `gid` in full hexadecimal form."""

    index: int
    gid: str
    type: GidType | None = None
    netdev: str | None = None

    @property
    def link_local(self) -> bool:
        """True for fe80::/10 and for IPv4-mapped 169.254/16: no router forwards these."""
        return self.gid.startswith("fe80:") or (self.ipv4 or "").startswith("169.254.")

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address of an IPv4-mapped GID, else None."""
        groups = self.gid.split(":")
        if len(groups) != 8 or groups[:5] != ["0000"] * 5 or groups[5] != "ffff":
            return None
        high, low = int(groups[6], 16), int(groups[7], 16)
        return f"{high >> 8}.{high & 255}.{low >> 8}.{low & 255}"

    @property
    def routable(self) -> bool:
        """A RoCE v2 GID made of an address that is neither link-local nor empty."""
        return self.type == "roce_v2" and not self.link_local


@dataclass(frozen=True)
class NicFacts:
    """One network port: a network interface, an RDMA port, or (usually) both faces of one."""

    name: str  # the network interface; for an RDMA port without one `device/port`
    netdev: str | None = None
    rdma_device: str | None = None  # mlx5_0, bnxt_re0 ...
    rdma_port: int | None = None
    link_layer: LinkLayer | None = None  # of the RDMA port, or of the interface (ARPHRD)
    state: str | None = None  # RDMA port: active, init, armed, down; else the interface's operstate
    physical_state: str | None = None  # link_up, polling, disabled ...
    rate_bytes_per_s: float | None = None
    rate_text: str | None = None  # 400 Gb/sec (4X NDR)
    mtu: int | None = None  # of the interface
    rdma_mtu: int | None = None  # active, of the RDMA port
    mac: str | None = None
    addresses: tuple[Address, ...] = ()
    gids: tuple[Gid, ...] = ()  # valid ones only; their indices are those of this port on this host
    sm_lid: int | None = None  # InfiniBand: 0 is a known value, no subnet manager
    lid: int | None = None
    subnet_prefix: str | None = None  # InfiniBand: fe80:0000:0000:0000 is the default prefix
    guid: str | None = None  # node GUID
    numa_node: int | None = None
    pci: str | None = None
    pci_id: str | None = None  # vendor:device, e.g. 15b3:1021
    pcie: Pcie = Pcie()
    driver: str | None = None
    firmware: str | None = None
    carrier: bool | None = None
    carrier_changes: int | None = None  # since boot
    admin_up: bool | None = None
    bond: str | None = None  # the interface this one is enslaved to
    bond_members: tuple[str, ...] = ()
    over: tuple[str, ...] = ()  # the interfaces it stands on: a VLAN's parent, the members of a bond or bridge
    virtual: bool | None = None  # no hardware below: lo, veth, docker0 (not a bond, VLAN or bridge over a real port)
    rdma_software: bool | None = None  # the RDMA port is the kernel's emulation over the interface (rxe, siw)
    virtual_function: bool | None = None  # SR-IOV
    counters: Mapping[str, int] = field(default_factory=dict)  # link_downed, symbol_error ...
    growing: Mapping[str, int] = field(default_factory=dict)  # counters that grew while they were watched, by how much
    fabric: PortFabric = field(default_factory=PortFabric)  # of an RDMA port

    @property
    def infiniband(self) -> bool:
        """An RDMA port of InfiniBand: it works without its interface, whose state says only whether IP runs over it."""
        return self.rdma_device is not None and self.link_layer == "infiniband"

    @property
    def carries_ip(self) -> bool:
        """Whether its addresses can be used: the interface is on and has a carrier, as far as that is known."""
        return bool(self.addresses) and self.admin_up is not False and self.carrier is not False


@dataclass(frozen=True)
class Library:
    """A shared library found on a host."""

    name: str
    path: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class RdmaFacts:
    """What a process of ours would find when it opens an RDMA device on this host."""

    devices: tuple[str, ...] | None = None
    device_files: tuple[str, ...] | None = None  # /dev/infiniband/*, those this user may open
    libraries: tuple[Library, ...] | None = None  # libibverbs, librdmacm, providers
    providers: tuple[str, ...] | None = None  # of libibverbs, as /etc/libibverbs.d names them
    fabric_providers: tuple[str, ...] | None = None  # of libfabric: efa, cxi, tcp ...
    memlock_bytes: Bytes | None = None  # soft limit, measured in a process started as we start workers
    peer_memory_modules: tuple[str, ...] | None = None  # loaded: nvidia_peermem, amdkfd's ib peer ...
    dma_buf: bool | None = None  # can a NIC register device memory through dma-buf; only registering proves it
    report: FabricReport | None = None  # of ibdiagnet, where somebody ran it


@dataclass(frozen=True)
class Interpreter:
    """One Python of a host and the versions its packages claim (metadata and version files, nothing imported)."""

    path: str  # as configured
    executable: str | None = None
    version: str | None = None
    prefix: str | None = None
    torch: str | None = None
    cuda: str | None = None  # the CUDA torch was built for
    hip: str | None = None  # the HIP torch was built for
    nccl: str | None = None
    rccl: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)  # others of interest: nixl, triton, numpy ...
    problem: str | None = None  # why it cannot be used
    vendors: tuple[str, ...] = ()  # whose devices' ranks alone it is for, as the inventory says; none: all


@dataclass(frozen=True)
class Container:
    """A container runtime that is installed, and whether this user may use it."""

    name: str
    path: str | None = None
    version: str | None = None
    usable: bool | None = None


@dataclass(frozen=True)
class NumaNode:
    node: int
    cpus: str | None = None  # 0-31,64-95
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Limit:
    """A resource limit of a process started as we start workers."""

    soft: Bytes | None = None
    hard: Bytes | None = None


@dataclass(frozen=True)
class Cpu:
    model: str | None = None
    sockets: int | None = None
    cores: int | None = None  # physical, all sockets
    threads: int | None = None  # logical
    allowed: int | None = None  # that this process may run on (affinity)


@dataclass(frozen=True)
class Folder:
    """A folder in which a run would write: `path` is the nearest one that exists. Written to and cleaned up again."""

    asked: str
    path: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    total_files: int | None = None  # inodes; 0 where the file system has no such limit
    free_files: int | None = None
    seconds: float | None = None  # to write, sync and rename a small file
    problem: str | None = None  # why that failed


@dataclass(frozen=True)
class ToolRun:
    """How long a tool took to answer, or why it gave no answer."""

    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class System:
    """The machine below: what it runs and what it is made of."""

    hostname: str | None = None
    machine: str | None = None  # x86_64, aarch64
    os: str | None = None  # Ubuntu 22.04.4 LTS
    kernel: str | None = None
    machine_id: str | None = None
    boot_id: str | None = None
    user: str | None = None
    uptime_s: float | None = None
    clock_s: float | None = None  # the host's wall clock (epoch) at the end of the probe
    probe_seconds: float | None = None
    clock_synchronized: bool | None = None  # the kernel's own belief (adjtimex)
    policy_rules: int | None = None  # routing rules beyond the three that every host has
    folders: tuple[Folder, ...] = ()
    tools: Mapping[str, ToolRun] = field(default_factory=dict)  # the vendors' tools
    kernel_log: tuple[str, ...] | None = None  # recent lines of device drivers that mean trouble
    cpu: Cpu = Cpu()
    numa: tuple[NumaNode, ...] = ()
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    container: str | None = None  # the runtime this host itself runs in, 'none' when it runs in none
    settings: Mapping[str, str] = field(default_factory=dict)  # numa_balancing, iommu, governor ... as read
    modules: Mapping[str, str] = field(default_factory=dict)  # kernel modules of interest: version or ''
    environment: Mapping[str, str] = field(default_factory=dict)  # allow-listed variables as a worker would see them
    addresses: tuple[str, ...] | None = None  # what the host's own name resolves to


@dataclass(frozen=True)
class HostFacts:
    """Everything a probe read on one host."""

    system: System = System()
    gpus: tuple[GpuFacts, ...] = ()
    nics: tuple[NicFacts, ...] = ()
    rdma: RdmaFacts = RdmaFacts()
    interpreters: tuple[Interpreter, ...] = ()
    containers: tuple[Container, ...] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)  # memlock, nofile, nproc, stack ...
    vendors: Mapping[str, str] = field(default_factory=dict)  # per vendor: 'present', 'absent', or what is wrong
    foreign: Mapping[str, int] = field(
        default_factory=dict
    )  # accelerators that no vendor's file knows: product -> count
    warnings: tuple[str, ...] = ()  # fallbacks and contradictions, one sentence each
    sources: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def why_unknown(self, path: str) -> str | None:
        """The reason why the value at `path` (gpus[3].uuid) could not be read, None when it was not tried."""
        return self.unknown.get(path) or self.unknown.get(_INDEX.sub("[*]", path))

    def gpu(self, identity: str) -> GpuFacts | None:
        """The GPU that a Reach names (`nvidia:0`)."""
        return next((g for g in self.gpus if g.id == identity), None)


def facts_to_data(facts: HostFacts) -> dict[str, Any]:
    """Plain data without what is unknown, so that a cluster file stays readable; `facts_from_data` reads it back."""
    pruned = _prune(encode(facts))
    return pruned if isinstance(pruned, dict) else {}


def facts_from_data(data: object, *, where: str) -> HostFacts:
    """HostFacts from plain data. Raises ConfigError naming the place that does not fit."""
    return decode(HostFacts, data, where=where)


_INDEX = re.compile(r"\[\d+\]")


def _prune(data: Any) -> Any:
    """`data` without None and empty mappings; empty lists stay, because known-empty differs from unknown."""
    if isinstance(data, dict):
        kept = {k: _prune(v) for k, v in data.items()}
        return {k: v for k, v in kept.items() if v is not None and v != {}}
    if isinstance(data, list):
        return [_prune(v) for v in data]
    return data
