"""The hosts a person names: arguments, inventory.yaml, a hostfile, an engine that holds them, or this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetctl.comm.contract.cluster import Access, Cluster
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.files import read_text
from hetctl.comm.contract.units import MiB
from hetctl.discovery.inventory_file import InventoryFile, Settings, over, read_inventory_file
from hetctl.launcher.engines import ray_cluster, slurm
from hetctl.launcher.hosts.host_names import HostName, expand

DEFAULT_FILE = Path("inventory.yaml")
MOST_SLOTS = 4096  # of one host
LOCAL = "localhost"  # the one name that means this machine without SSH


@dataclass(frozen=True)
class InventoryHost:
    """One host of the inventory."""

    name: str
    access: Access
    data_address: str | None = None
    slots: int | None = None  # a hostfile's count of devices
    group: str | None = None


def entries_of(cluster: Cluster) -> tuple[InventoryHost, ...]:
    """The hosts of a cluster that can be entered."""
    return tuple(InventoryHost(h.name, h.access, h.data_address) for h in cluster.hosts if h.access is not None)


@dataclass(frozen=True)
class Inventory:
    """The hosts to discover; `origin` says in words where they come from."""

    entries: tuple[InventoryHost, ...]
    origin: str
    networks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def resolve(
    hosts: Sequence[str] = (),
    file: Path | None = None,
    *,
    engine: str | None = None,
    environment: Mapping[str, str] | None = None,
    default_file: Path = DEFAULT_FILE,
) -> Inventory:
    """The inventory meant by host arguments, a file, an engine that holds hosts, or none of these. Raises HetctlError.

    Without `file`, `./inventory.yaml` is taken if it is there; then a Slurm allocation; then this machine.
    """
    environment = os.environ if environment is None else environment
    if engine is not None:
        return _held_by(engine, hosts, file, environment)
    if file is not None:
        inventory = load_inventory(file)
        return select(inventory, hosts) if hosts else inventory
    if default_file.exists():
        inventory = load_inventory(default_file)
        return select(inventory, hosts, others=True) if hosts else inventory
    if hosts:
        return _plain([spot for text in hosts for spot in expand(text)], "the command line")
    if slurm.components(environment):
        return _of_slurm(environment)
    return this_machine()


def _held_by(engine: str, hosts: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> Inventory:
    """The hosts that an engine (of HOLDERS) holds, or those of them that are named."""
    if file is not None:
        raise ConfigError("--from and --inventory exclude each other", hint="give one of them")
    if engine not in HOLDERS:
        raise ConfigError(f"--from {engine} is not known", hint=" or ".join((*HOLDERS, "kubernetes")))
    inventory = HOLDERS[engine](environment)
    return select(inventory, hosts) if hosts else inventory


def _of_slurm(environment: Mapping[str, str]) -> Inventory:
    nodes = slurm.components(environment)
    if not nodes:
        raise ConfigError("this is not inside a Slurm allocation", hint="salloc --nodes=2 --exclusive, then again")
    job = environment.get("SLURM_JOB_ID", "?")
    return _plain([HostName(node) for node in nodes], f"the Slurm allocation of job {job}")


def _of_ray(_: Mapping[str, str]) -> Inventory:
    nodes = ray_cluster.nodes().values()
    entries = [InventoryHost(n.name, Access(n.address, way="ray")) for n in nodes if n.bundle]
    return Inventory(_checked(entries, "the Ray cluster"), "the Ray cluster")


HOLDERS: Mapping[str, Callable[[Mapping[str, str]], Inventory]] = {"slurm": _of_slurm, "ray": _of_ray}


def this_machine() -> Inventory:
    """The machine hetctl runs on, without SSH."""
    name = socket.gethostname().split(".")[0] or LOCAL
    return Inventory((InventoryHost(name, Access()),), "this machine")


def load_inventory(file: Path) -> Inventory:
    """inventory.yaml, or a DeepSpeed/MPI hostfile (any other ending). Raises ConfigError."""
    if file.suffix.lower() not in (".yaml", ".yml", ".json"):
        return _from_hostfile(file)
    parsed = read_inventory_file(file)
    return Inventory(_checked(_layered(parsed, file.name), str(file)), str(file), parsed.networks)


def select(inventory: Inventory, hosts: Sequence[str], *, others: bool = False) -> Inventory:
    """Only the named hosts and groups. With `others`, hosts it does not hold are taken as they are named.

    Raises ConfigError for a name the inventory does not hold.
    """
    groups = {e.group for e in inventory.entries if e.group}
    by_name = {e.name: e for e in inventory.entries}
    chosen: dict[str, InventoryHost] = {}
    for text in hosts:
        if text in groups:
            chosen |= {e.name: e for e in inventory.entries if e.group == text}
            continue
        for spot in expand(text):
            if spot.host not in by_name and not others:
                hint = nearest(spot.host, [*by_name, *groups])
                raise ConfigError(f"'{spot.host}' is not in {inventory.origin}", hint=hint)
            known = by_name.get(spot.host)
            chosen[spot.host] = _pointed(known, spot) if known else _entry(spot, Settings())
    return replace(inventory, entries=tuple(chosen.values()))


def _pointed(entry: InventoryHost, spot: HostName) -> InventoryHost:
    """The inventory's entry, with the user and port that were typed."""
    access = replace(entry.access, user=spot.user or entry.access.user, port=spot.port or entry.access.port)
    return replace(entry, access=access)


def _plain(spots: Sequence[HostName], origin: str) -> Inventory:
    return Inventory(_checked([_entry(spot, Settings()) for spot in spots], origin), origin)


def _layered(parsed: InventoryFile, where: str) -> list[InventoryHost]:
    """Every host once, its own settings over its group's, those over the defaults."""
    group_of: dict[str, str] = {}
    spots: dict[str, HostName] = {}
    for name, group in parsed.groups.items():
        for spot in _spots(group.hosts):
            if spot.host in group_of:
                raise ConfigError(f"{where}: '{spot.host}' is in two groups, '{group_of[spot.host]}' and '{name}'")
            group_of[spot.host], spots[spot.host] = name, spot
    own: dict[str, Settings] = {}
    for pattern, settings in parsed.hosts.items():
        for spot in expand(pattern):
            if spot.host in own:
                raise ConfigError(f"{where}: the host '{spot.host}' is listed twice")
            shared_spot = spots.get(spot.host, spot)
            spots[spot.host] = HostName(spot.host, spot.user or shared_spot.user, spot.port or shared_spot.port)
            own[spot.host] = settings or Settings()
    entries = []
    for host, spot in spots.items():
        group_name = group_of.get(host)
        shared = over(parsed.defaults, parsed.groups[group_name]) if group_name else parsed.defaults
        entries.append(_entry(spot, over(shared, own.get(host, Settings())), group=group_name))
    return entries


def _spots(patterns: Iterable[str]) -> list[HostName]:
    return [spot for pattern in patterns for spot in expand(pattern)]


def _entry(spot: HostName, settings: Settings, *, group: str | None = None, slots: int | None = None) -> InventoryHost:
    bare = spot.host == LOCAL and not (spot.user or spot.port or settings.address or settings.port)
    named = settings.python or "python3"
    pythons = {} if isinstance(named, str) else named  # the first of several also asks the host and starts its ranks
    access = Access(
        address=None if bare else settings.address or spot.host,
        user=spot.user or settings.user,
        port=spot.port or settings.port,
        identity_file=settings.identity_file,
        proxy_jump=settings.proxy_jump,
        python=named if isinstance(named, str) else next(iter(named.values())),
        pythons=pythons,
        prefix=settings.container or (),
        env={name: None if value is None else str(value) for name, value in (settings.env or {}).items()},
        exclude_nics=settings.exclude_nics or (),
        slurm=settings.slurm or (),
        way="kubernetes" if settings.kubernetes else None,
        kubernetes=settings.kubernetes and replace(settings.kubernetes, group=settings.kubernetes.group or group),
        gpus=settings.gpus if settings.gpus is not None or slots is None else tuple(range(slots)),
    )
    return InventoryHost(spot.host, access, settings.data_address, slots, group)


def _checked(entries: Sequence[InventoryHost], where: str) -> tuple[InventoryHost, ...]:
    if not entries:
        raise ConfigError(f"{where} names no host", hint="write hosts: node[01-16]")
    return tuple(entries)


def _from_hostfile(file: Path) -> Inventory:
    """`host slots=8` per line (DeepSpeed, OpenMPI), or `host:8` (MPICH), `#` begins a comment."""
    entries: dict[str, InventoryHost] = {}
    for number, line in enumerate(read_text(file, what="hostfile", max_bytes=MiB).splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        spot, slots = _hostfile_line(words, f"{file}, line {number}")
        if spot.host in entries:
            raise ConfigError(f"{file}, line {number}: the host '{spot.host}' is listed twice")
        entries[spot.host] = _entry(spot, Settings(), slots=slots)
    return Inventory(_checked(list(entries.values()), str(file)), str(file))


def _hostfile_line(words: Sequence[str], where: str) -> tuple[HostName, int | None]:
    spots = expand(words[0])
    slots = spots[0].port  # MPICH writes the count where SSH writes the port
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not equals or not value.isdecimal():
            raise ConfigError(
                f"{where}: '{word}' is not what a hostfile holds", hint="write `host slots=8`, or an inventory.yaml"
            )
        slots = int(value) if key == "slots" else slots
    if len(spots) != 1 or (slots is not None and not 0 < slots <= MOST_SLOTS):
        raise ConfigError(f"{where}: one host with 1 to {MOST_SLOTS} slots is expected")
    return replace(spots[0], port=None), slots
