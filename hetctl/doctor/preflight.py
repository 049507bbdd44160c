"""Before a run: the quick checks that its plan needs, over facts at hand, in a fraction of a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from hetctl.comm.contract.cluster import Access, Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.facts import HostFacts, facts_from_data
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import CheckedCluster, Finding
from hetctl.doctor.registry import CHECKS
from hetctl.doctor.runner import first_of, judge, to_mend
from hetctl.probe import Options, parse
from hetctl.probe.raw import load
from hetctl.probe.remote import Probe
from hetctl.probe.wanted import light_request

_EVERY_RUN = {"host.disk"}
_SEVERAL_HOSTS = {"host.name", "net.ifname", "net.mtu", "sw.match", "lim.nofile"}
_RDMA = {"rdma.port_state", "rdma.sm", "rdma.gid", "rdma.gid_env", "rdma.libs", "lim.memlock"}
_GPUS = {"gpu.count", "gpu.ecc_ras", "gpu.recovery_action", "host.shm", "env.debug_leftovers"}
_DEADLINE_S = 2.0


def needed(plan: Plan, cluster: Cluster) -> set[str]:
    """The ids of the checks that this plan's ranks depend on: nothing of RDMA unless something of it goes over RDMA."""
    ids = set(_EVERY_RUN)
    if len(_hosts(plan, cluster)) > 1:
        ids |= _SEVERAL_HOSTS
    if any(TRANSPORTS[b.transport].engine for b in plan.bridges) or any(g.net == "ib" for g in plan.groups):
        ids |= _RDMA
    if any(g.net == "plugin" for g in plan.groups):
        ids |= {"rdma.plugin"}
    if any(TRANSPORTS[b.transport].device_memory for b in plan.bridges):
        ids |= {"rdma.peer_mem"}
    if cluster.source == "discovered" and any(island.vendor != "cpu" for island in plan.islands):
        ids |= _GPUS | {"sw.build"}
    return ids


def _hosts(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The hosts that ranks really run on: an emulation's own one, whatever hosts its plan was made for."""
    if cluster.source == "emulated" and cluster.hosts:
        return tuple(host.name for host in cluster.hosts)
    return tuple(dict.fromkeys(rank.host for rank in plan.ranks))


def preflight(plan: Plan, cluster: Cluster, *, folder: Path) -> list[Finding]:
    """The findings of the checks a plan needs: of this machine read anew, of others as discovery left them."""
    ids = needed(plan, cluster)
    facts = facts_of(plan, cluster, folder=folder)
    known = {host.name: host.access for host in cluster.hosts}
    used = {(rank.host, rank.device) for rank in plan.ranks}
    hosts = [replace(h, devices=tuple(d for d in h.devices if (h.name, d.index) in used)) for h in cluster.hosts]
    reports = tuple(Report(name=name, access=known.get(name) or Access(), facts=f) for name, f in facts.items())
    checks = [check for check in CHECKS if check.id in ids]
    return judge(CheckedCluster(reports, replace(cluster, hosts=tuple(hosts))), checks)


def facts_of(plan: Plan, cluster: Cluster, *, folder: Path) -> Mapping[str, HostFacts]:
    """Host -> facts, where there are any. Emulated hosts stand on this machine."""
    found: dict[str, HostFacts] = {}
    for name in _hosts(plan, cluster):
        host = cluster.host_by_name.get(name)
        known = facts_from_data(host.facts, where=name) if host and host.facts else None
        if host is None or host.access is None or host.access.local:
            fresh = this_machine(folder)
            # of what discovery found out with tools nothing is lost; the folders are this run's
            known = replace(known, system=replace(known.system, folders=fresh.system.folders)) if known else fresh
        if known is not None:
            found[name] = known
    return found


def this_machine(folder: Path) -> HostFacts:
    """What files and calls tell of this machine, no tool started, no Python described."""
    options = Options(interpreters=(sys.executable,), deadline_s=_DEADLINE_S, folders=(str(folder),))
    return parse(load(Probe(light_request(options)).run().encode()))


def check_before(plan: Plan, cluster: Cluster, *, run_dir: Path | None, skip: bool, say: Callable[[str], None]) -> None:
    """The quick checks that a plan needs. Raises WorkFailed on failures unless told to `skip` them, which is said."""
    folder = run_dir / "checkpoints" if run_dir else Path("runs").absolute()
    findings = preflight(plan, cluster, folder=folder)
    if not skip:
        refuse_on_failures(findings, {h.name for h in cluster.hosts if h.access and not h.access.local})
    for finding in findings:
        if finding.state == "fail":
            say(f"{finding.host}: {finding.check}: {finding.reason}; started all the same (--skip-checks)")


def refuse_on_failures(findings: list[Finding], elsewhere: Collection[str] = ()) -> None:
    """Raise WorkFailed naming what to mend first. What hosts `elsewhere` are is what discovery once found."""
    failures = to_mend(findings)
    if not failures:
        return
    first = first_of(findings)
    assert first is not None
    more = f" (and {len(failures) - 1} more: hetctl doctor)" if len(failures) > 1 else ""
    again = "then discover the cluster again, or" if first.host in elsewhere else "or"
    hint = f"{first.fix or 'mend it'}; {again} --skip-checks"
    raise WorkFailed(f"{first.host}: {first.check}: {first.reason}{more}", hint=hint)
