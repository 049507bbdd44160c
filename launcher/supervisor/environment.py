"""What each rank's process is started with: its environment, with a reason for each value, and its placement. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster, Device, Host, Nic
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.fabrics import PLUGIN_KINDS, RDMA_KINDS, plugin_libraries
from hetctl.comm.contract.facts import HostFacts, NicFacts, facts_from_data
from hetctl.comm.contract.natives import HOST, NATIVES, native_of
from hetctl.comm.contract.units import count_of
from hetctl.launcher.agent.orders import WatchedPort

_HIDDEN = "(from your environment)"


@dataclass(frozen=True)
class Setting:
    """One environment variable and why it has its value."""

    name: str
    value: str
    reason: str
    secret: bool = False  # taken from who launches: never shown
    device: int | None = None  # of the host: for its rank alone; None: for all of the host's ranks


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its host and its device there."""

    rank: int
    host: str
    device: int


@dataclass(frozen=True)
class HostShape:
    """What the settings of a host's ranks depend on, beside the seats."""

    cores: int
    device_type: str  # cpu or a row of NATIVES: what the ranks of this host really use
    master_address: str
    socket_interface: str | None  # that holds the data address; None: let gloo choose
    code_path: str  # PYTHONPATH that finds hetctl and its entry point


def device_type(cluster: Cluster, vendors: Iterable[str]) -> str:
    """The torch device type of these vendors' ranks: under an emulation by what it really runs.

    Of several the first that is no host; hosts of the others say so themselves (`host_settings`).
    """
    types = [native_of(library=cluster.library_of(vendor)).device_type for vendor in vendors]
    return next((kind for kind in types if kind != HOST), HOST)


def rank_settings(
    seats: Sequence[Seat],
    seat: Seat,
    host: HostShape,
    *,
    world_size: int,
    files: Mapping[str, Path],
    more: Sequence[Setting] = (),
) -> tuple[Setting, ...]:
    """Everything a rank's process gets in its environment. `files` maps variable names to files on that host.

    `seats` are at least those of its host; `more` is the host's own (see `host_settings`); what it names wins, but for
    the ranks' numbers.
    """
    local = [s.rank for s in seats if s.host == seat.host]
    beside = _beside(seats, seat, more)
    threads = max(1, host.cores // len(local))
    mine = {
        s.name: s
        for s in (
            Setting(
                "OMP_NUM_THREADS",
                str(threads),
                f"{count_of(host.cores, 'core')} shared by {count_of(len(local), 'rank')}",
            ),
            Setting("PYTHONUNBUFFERED", "1", "logs are read while they grow"),
            Setting(variables.DEVICE_TYPE, host.device_type, "what this host's ranks compute on"),
            *_sockets(host.socket_interface),
            *(s for s in more if s.device in (None, seat.device)),
            Setting("RANK", str(seat.rank), "from the plan"),
            Setting("WORLD_SIZE", str(world_size), "ranks in the plan"),
            Setting(
                "LOCAL_RANK", str(beside.index(seat.rank)), "order among this host's ranks that see the same devices"
            ),
            Setting("LOCAL_WORLD_SIZE", str(len(beside)), "ranks on this host that see the same devices"),
            Setting("MASTER_ADDR", host.master_address, "where the run's store listens"),
            Setting("TORCHELASTIC_USE_AGENT_STORE", "True", "the store lives beside the agent, never in a rank"),
            _own_device(beside, seat, more),
            Setting("PYTHONPATH", host.code_path, "where hetctl's code and its entry point for torch are"),
            *(Setting(name, str(path), "a file of this run") for name, path in files.items()),
        )
    }
    return tuple(mine.values())


def host_settings(
    cluster: Cluster, host: Host, seats: Sequence[Seat], *, environment: Mapping[str, str] | None = None
) -> tuple[Setting, ...]:
    """What holds for all ranks of one host, derived from its facts: devices, RDMA ports, and the person's own `env`.

    `environment` is that of who launches. Raises ConfigError for a variable that is wanted from it but not set.
    """
    mine = [next(d for d in host.devices if d.index == s.device) for s in seats if s.host == host.name]
    settings = (
        _shared(mine)
        if cluster.runs is not None
        else [*visible_devices(mine), *_rdma(cluster, host), *_plugin(cluster, host)]
    )
    own = host.access.env if host.access else {}
    settings += _unlike_types(cluster, mine)
    settings += _wires(cluster, host, mine)
    settings += [] if "GLOO_SOCKET_IFNAME" in own else _nics(cluster, host, mine)
    for name, value in own.items():
        settings.append(_own(name, value, environment, host.name))
    return tuple(settings)


def interface_of(host: Host) -> str | None:
    """The network interface that holds a host's data address, None when its facts do not say."""
    for nic in host.nics:
        if nic.address is not None and nic.address == host.data_address:
            return nic.name
    return next((n.netdev for n in _facts(host).nics if any(a.ip == host.data_address for a in n.addresses)), None)


def ports_of(cluster: Cluster, host: Host, seats: Sequence[Seat], *, rails: Iterable[str] = ()) -> list[WatchedPort]:
    """The network ports that a run uses on a host, for its agent to watch.

    They are the one that holds the data address, those near the seats' devices, and those that the plan's `rails` name.
    """
    near = {n for s in seats for d in host.devices if s.host == host.name and d.index == s.device for n in d.nics}
    wanted, known = {*near, *rails, interface_of(host)}, {n.name: n for n in _facts(host).nics}
    if cluster.source == "emulated" and host.access is None:
        return []  # labels on this machine's devices
    ports = {n.name: known[n.name].rdma_port if n.name in known else None for n in host.nics}
    return [WatchedPort(n.name, n.rdma_device, ports[n.name]) for n in host.nics if n.name in wanted]


def _sockets(interface: str | None) -> list[Setting]:
    if interface is None:
        return []
    why = f"{interface} holds the data address"
    gloo = Setting("GLOO_SOCKET_IFNAME", interface, why)
    return [gloo, Setting("NCCL_SOCKET_IFNAME", f"={interface}", f"{why}; '=' because NCCL else takes it as a prefix")]


def visible_devices(devices: Sequence[Device]) -> list[Setting]:
    """Which devices the ranks of a host see, in the order of their local ranks; one variable per vendor.

    Where there are several vendors each rank gets its own vendor's alone: ROCm reads CUDA's variable too.
    """
    settings = []
    vendors = dict.fromkeys(d.vendor for d in devices)
    for vendor in vendors:
        native, own = NATIVES[vendor], [d for d in devices if d.vendor == vendor]
        if not native.visible_devices:
            continue
        by_uuid = native.selects_by_uuid and all(d.uuid for d in own)
        names = [str(d.uuid if by_uuid else d.index if d.ordinal is None else d.ordinal) for d in own]
        how = "by UUID: indices change when a driver loads" if by_uuid else "by index in PCI order"
        for whose in [d.index for d in own] if len(vendors) > 1 else [None]:
            why = f"the plan's devices of this host, {how}"
            settings.append(Setting(native.visible_devices, ",".join(names), why, device=whose))
            if native.device_order:
                why = "so that indices mean what discovery saw"
                settings.append(Setting(native.device_order, "PCI_BUS_ID", why, device=whose))
    return settings


def _shared(devices: Sequence[Device]) -> list[Setting]:
    """Under emulation: the real device of each label that shares one with others."""
    why = "a GPU that several emulated devices share"
    return [
        Setting(variables.DEVICE_INDEX, str(d.ordinal), why, device=d.index) for d in devices if d.ordinal is not None
    ]


def _unlike_types(cluster: Cluster, devices: Sequence[Device]) -> list[Setting]:
    """Where the cluster's islands have several device types: that of each rank's own device."""
    if len({device_type(cluster, [island.vendor]) for island in cluster.islands}) < 2:
        return []
    why = "the device type of its vendor"
    return [Setting(variables.DEVICE_TYPE, device_type(cluster, [d.vendor]), why, device=d.index) for d in devices]


def _own_device(beside: Sequence[int], seat: Seat, more: Sequence[Setting]) -> Setting:
    """A rank's device as its process counts: its place among the visible ones, else as told, else the plan's index."""
    if told := [s for s in more if s.name == variables.DEVICE_INDEX and s.device == seat.device]:
        return told[0]
    place = beside.index(seat.rank) if _visible(seat.device, more) else seat.device
    return Setting(variables.DEVICE_INDEX, str(place), "the plan's device of this rank")


def _beside(seats: Sequence[Seat], seat: Seat, more: Sequence[Setting]) -> list[int]:
    """The ranks of a seat's host that see the same devices as its own."""
    mine = _visible(seat.device, more)
    return [s.rank for s in seats if s.host == seat.host and _visible(s.device, more) == mine]


def _visible(device: int, more: Sequence[Setting]) -> dict[str, str]:
    """What selects the devices that the rank of a device sees."""
    names = {n.visible_devices for n in NATIVES.values() if n.visible_devices}
    return {s.name: s.value for s in more if s.name in names and s.device in (None, device)}


def _rdma(cluster: Cluster, host: Host) -> list[Setting]:
    """The RDMA ports that the host's islands share, and the GID that reaches their network."""
    fabrics = {i.fabric for i in cluster.islands if host.name in i.hosts}
    ports = _rdma_ports(cluster, host, fabrics)
    if not ports:
        return []
    names = [_hca(nic, port) for nic, port in ports]
    networks = ", ".join(sorted({str(nic.network) for nic, _ in ports}))
    settings = [Setting("NCCL_IB_HCA", "=" + ",".join(names), f"the RDMA ports in {networks}; '=' for exact names")]
    indices = {_gid_index(port) for nic, port in ports if nic.kind == "roce"}
    if len(indices) == 1 and None not in indices:
        why = "the routable RoCE v2 GID of these ports, found by its content"
        settings.append(Setting("NCCL_IB_GID_INDEX", str(indices.pop()), why))
    return settings


def _plugin(cluster: Cluster, host: Host) -> list[Setting]:
    """Which plugin reaches the host's fabric, where it has not the name that its native library looks for by itself."""
    kinds = {n.name: n.kind for n in cluster.networks}
    vendors = {i.vendor for i in cluster.islands if host.name in i.hosts and kinds.get(i.fabric) in PLUGIN_KINDS}
    for vendor in sorted(vendors):
        names = [lib.name.partition(".")[0].partition("-net") for lib in plugin_libraries(_facts(host), vendor)]
        suffixes = [suffix.lstrip("-") for _, net, suffix in names if net]
        if suffixes and "" not in suffixes:
            return [
                Setting("NCCL_NET_PLUGIN", suffixes[0], "the plugin through which its native library uses libfabric")
            ]
    return []


def _rdma_ports(cluster: Cluster, host: Host, networks: Container[str | None]) -> list[tuple[Nic, NicFacts | None]]:
    """A host's RDMA ports in these networks, each with what was read of it."""
    kinds = {n.name: n.kind for n in cluster.networks}
    nics = [n for n in host.nics if n.rdma_device and n.network in networks]
    nics = [n for n in nics if kinds.get(n.network or "") in RDMA_KINDS]
    known = {n.netdev or n.name: n for n in _facts(host).nics} if nics else {}
    return [(n, known.get(n.name)) for n in nics]


def _wires(cluster: Cluster, host: Host, devices: Sequence[Device]) -> list[Setting]:
    """The RDMA ports that reach hosts of other islands, with their GID indices: what each rank's bridge may use."""
    reached = {n.network for other in _abroad(cluster, host) for n in other.nics if n.rdma_device}
    words = {}
    for nic, port in _rdma_ports(cluster, host, reached):
        index = _gid_index(port) if nic.kind == "roce" else None
        words[nic.name] = _hca(nic, port) + ("" if index is None else f"={index}") + f"@{nic.network}"
    why = "the RDMA ports that reach other islands, and their GIDs there"
    if len({n.network for n in host.nics if n.name in words}) > 1:
        # a network for each rail: any two ranks may have to talk, and those of different rails would share none
        return [Setting(variables.RDMA, ",".join(words.values()), why)]
    return _shared_out(variables.RDMA, words, devices, why)


def _nics(cluster: Cluster, host: Host, devices: Sequence[Device]) -> list[Setting]:
    """The interfaces that reach hosts of other islands, where there is more than the one of the data address."""
    reached = {n.network for other in _abroad(cluster, host) for n in other.nics if n.address and n.network}
    nics = [n for n in host.nics if n.address and n.network in reached]
    fastest = max((n.rate_bytes_per_s or 0.0 for n in nics), default=0.0)
    nics = [n for n in nics if n.rate_bytes_per_s is None or n.rate_bytes_per_s * 2 >= fastest]
    if {n.name for n in nics} <= {interface_of(host)}:
        return []
    words = {n.name: f"{n.name}@{n.network}" for n in nics}
    return _shared_out(variables.NICS, words, devices, "the interfaces that reach other islands")


def _abroad(cluster: Cluster, host: Host) -> list[Host]:
    """The other hosts that have a rank of another island than this one's."""
    mine = {i.name for i in cluster.islands if host.name in i.hosts}
    names = {name for i in cluster.islands if i.name not in mine or len(mine) > 1 for name in i.hosts} - {host.name}
    return [cluster.host_by_name[name] for name in sorted(names)]


def _shared_out(variable: str, words: Mapping[str, str], devices: Sequence[Device], why: str) -> list[Setting]:
    """One setting a device: the NICs near it (`words`: by interface), and its part of those that are near no other.

    A device that is near none takes them all in turn.
    """
    if not words:
        return []
    near = {d.index: [n for n in d.nics if n in words] for d in devices}
    claimed = {name for names in near.values() for name in names}
    for name in (n for n in words if n not in claimed):
        if any(near.values()):
            near[min(near, key=lambda index: len(near[index]))].append(name)
    settings = []
    for index, names in near.items():
        reason = f"{why}; {'near' if names else 'none is near'} its device"
        settings.append(Setting(variable, ",".join(words[n] for n in names or words), reason, device=index))
    return settings


def _hca(nic: Nic, port: NicFacts | None) -> str:
    return f"{nic.rdma_device}:{port.rdma_port}" if port and port.rdma_port else str(nic.rdma_device)


def _gid_index(port: NicFacts | None) -> int | None:
    return next((g.index for g in port.gids if g.routable), None) if port else None


def _own(name: str, value: str | None, environment: Mapping[str, str] | None, host: str) -> Setting:
    if not name or "=" in name or "\0" in name + (value or ""):
        raise ConfigError(f"{host}: {name!r} cannot be the name of an environment variable, or its value holds a NUL")
    if value is not None:
        return Setting(name, value, "from the inventory")
    found = (environment or {}).get(name)
    if found is None:
        raise ConfigError(f"{host} wants {name} from your environment, where it is not set", hint=f"export {name}=...")
    return Setting(name, found, "from the environment of who launches", secret=True)


def without_secrets(settings: Sequence[Setting]) -> list[Setting]:
    """The settings as they may be shown."""
    return [replace(s, value=_HIDDEN) if s.secret else s for s in settings]


def _facts(host: Host) -> HostFacts:
    return facts_from_data(dict(host.facts), where=f"facts of {host.name}")
