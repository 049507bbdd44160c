"""Where a command runs: which cluster, and which of this machine's devices stand for it under emulation."""

from __future__ import annotations

from pathlib import Path

from hetctl.runs import resolve
from hetctl.comm.contract.cluster import Cluster, load_cluster
from hetctl.comm.contract.emulate import SpecIsland, SpecPart, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.console import Sink
from hetctl.discovery.this_machine import this_machine
from hetctl.trainer.planning.hardware import CLASSES


def find_running_cluster(
    cluster_file: Path | None, emulate: str | None, *, plan: Plan | None = None, sink: Sink
) -> Cluster:
    """The cluster to run on: `--cluster`, the islands a plan was made for, `--emulate`, or ./cluster.yaml.

    Without any of them it is the default emulation. An emulation labels this machine's devices, and says which.
    """
    if cluster_file is not None and emulate is not None:
        raise ConfigError("--cluster and --emulate exclude each other", hint="give one of them")
    here = Path("cluster.yaml")
    if cluster_file is None and emulate is None and plan is None and here.is_file():
        sink.warn("using ./cluster.yaml")
        cluster_file = here
    if cluster_file is not None:
        return load_cluster(cluster_file)
    spec = _spec_of(plan) if plan else parse_spec(emulate or resolve.DEFAULT_SPEC, CLASSES)
    machine, words = this_machine([island.count for island in spec])
    sink.say(f"emulating {emulate or (_words(plan) if plan else resolve.DEFAULT_SPEC)}: {words}")
    cluster = label_machine(spec, machine)
    if any(p.speed != 1 for i in spec for p in i.parts) and cluster.runs == "gloo":
        sink.warn("an @SPEED weights the plan only: processes on CPUs run as fast as they can")
    if any(p.speed != 1 for i in spec for p in i.parts) and cluster.shares_devices:
        sink.warn("an @SPEED is found by trying, which other ranks on the GPU disturb: it may come out otherwise")
    return cluster


def _spec_of(plan: Plan) -> tuple[SpecIsland, ...]:
    """The emulation a plan file was made for: its islands' ranks, one by one."""
    islands = []
    for island in plan.islands:
        parts = tuple(SpecPart(plan.ranks[r].device_class, 1, plan.ranks[r].speed) for r in island.ranks)
        islands.append(SpecIsland(island.vendor, parts))
    return tuple(islands)


def _words(plan: Plan) -> str:
    return ",".join(f"{i.name}:{len(i.ranks)}" for i in plan.islands)
