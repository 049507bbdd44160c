"""Which cluster a command means: a file's, a plan's, an emulation's, or ./cluster.yaml; to run on, or to plan for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.cluster import Cluster, load_cluster
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.emulate import SpecIsland, SpecPart, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import HOST
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import listed
from hetctl.console import Sink
from hetctl.discovery.this_machine import this_machine
from hetctl.trainer.planning.hardware import CLASSES, Hardware

DEFAULT_SPEC = "h200:2,mi325x:2"
HERE = Path("cluster.yaml")


@dataclass(frozen=True)
class Where:
    """What a command line says of the cluster: `--cluster F`, `--emulate SPEC|F`, or neither."""

    file: Path | None = None
    emulate: str | None = None
    classes: tuple[DeviceClass, ...] = ()  # that a person described
    links: tuple[str, ...] = ()  # A-B=NETWORK, between islands of a SPEC

    def __post_init__(self) -> None:
        if self.file is not None and self.emulate is not None:
            raise ConfigError("--cluster and --emulate exclude each other", hint="give one of them")
        if self.links and (self.file is not None or self.emulate is None or self.emulated_file is not None):
            raise ConfigError("--link describes a network between islands of --emulate SPEC", hint="a file has its own")

    @property
    def hardware(self) -> Hardware:
        """The hardware table with a person's rows."""
        return CLASSES.with_own(self.classes)

    @property
    def emulated_file(self) -> Path | None:
        """The cluster file that --emulate names instead of a SPEC."""
        return Path(self.emulate) if self.emulate and self.emulate.endswith((".yaml", ".yml")) else None


def described_cluster(where: Where, sink: Sink) -> Cluster:
    """The cluster to plan for; an emulated one need not exist, and is taken from published and vendors' figures."""
    if file := where.file or where.emulated_file:
        return load_cluster(file)
    if where.emulate is None and HERE.is_file():
        sink.warn("planning for ./cluster.yaml")
        return load_cluster(HERE)
    if where.emulate is None:
        said = f"planning for {DEFAULT_SPEC}, which you need not own"
        sink.warn(f"no --cluster, no --emulate and no ./cluster.yaml: {said}")
    spec = parse_spec(where.emulate or DEFAULT_SPEC, where.hardware)
    return describe_cluster(spec, where.hardware, where.links)


def running_cluster(where: Where, sink: Sink, *, plan: Plan | None = None) -> Cluster:
    """The cluster to run on: a file's, or this machine's devices labelled as a plan's or an emulation's islands."""
    if where.file is not None:
        return _stood_for(load_cluster(where.file), sink)
    if where.emulate is None and plan is None and HERE.is_file():
        sink.warn("using ./cluster.yaml")
        return _stood_for(load_cluster(HERE), sink)
    if plan is not None:
        return _labelled(_islands_of_plan(plan), ",".join(f"{i.name}:{len(i.ranks)}" for i in plan.islands), sink)
    if file := where.emulated_file:
        return _labelled(_islands_of(load_cluster(file)), str(file), sink)
    words = where.emulate or DEFAULT_SPEC
    return _labelled(parse_spec(words, where.hardware), words, sink)


def _stood_for(cluster: Cluster, sink: Sink) -> Cluster:
    """A file's cluster, and what its devices really are where it says so (`source: emulated`)."""
    if cluster.source == "emulated" and cluster.runs:
        real = "CPU processes stand" if cluster.runs == "gloo" else f"devices of {cluster.runs} stand"
        sink.warn(f"{real} for {listed([island.name for island in cluster.islands])}: the cluster file is an emulation")
    return cluster


def _labelled(spec: tuple[SpecIsland, ...], words: str, sink: Sink) -> Cluster:
    """This machine's devices as the islands of `spec`, said aloud."""
    on_host = sum(island.count for island in spec if island.vendor == HOST)
    machine, devices = this_machine([i.count for i in spec if i.vendor != HOST], on_host=on_host)
    sink.say(f"emulating {words}: {devices}")
    if any(island.said for island in spec):
        sink.warn("hosts and networks of the SPEC are for `hetctl plan`: here islands talk as this machine can")
    cluster = label_machine(spec, machine)
    held = any(part.speed != 1 for island in spec for part in island.parts)
    if held and cluster.runs == "gloo":
        sink.warn("an @SPEED weights the plan only: processes on CPUs run as fast as they can")
    if held and cluster.shares_devices:
        sink.warn("an @SPEED is found by trying, which other ranks on the GPU disturb: it may come out otherwise")
    return cluster


def _islands_of_plan(plan: Plan) -> tuple[SpecIsland, ...]:
    """The emulation that a plan file was made for: its islands' ranks, one by one."""
    islands = []
    for island in plan.islands:
        parts = tuple(SpecPart(plan.ranks[r].device_class, 1, plan.ranks[r].speed) for r in island.ranks)
        islands.append(SpecIsland(island.vendor, parts))
    return tuple(islands)


def _islands_of(cluster: Cluster) -> tuple[SpecIsland, ...]:
    """A cluster file's islands, to be stood for: each device with its class, speed and memory."""
    islands = []
    for island in cluster.islands:
        devices = [cluster.device(member) for member in island.members]
        parts = tuple(SpecPart(d.device_class, 1, d.speed, d.room_bytes) for d in devices)
        islands.append(SpecIsland(island.vendor, parts))
    return tuple(islands)
