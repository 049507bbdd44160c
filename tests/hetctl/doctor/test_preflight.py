"""The checks before a run: those its plan needs and no others, quickly, and a refusal that says what to do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access, Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.facts import facts_to_data
from hetctl.comm.contract.plan import Plan, PlannedGroup
from hetctl.discovery.fabric import build
from hetctl.doctor.preflight import needed, preflight, refuse_on_failures
from hetctl.doctor.runner import exit_code
from tests.busy import busy
from tests.hetctl.doctor import healthy_hosts
from tests.layouts import Cut, Layout, Pipe, plan_of

EMULATED = Cluster((), (), source="emulated")


def plan(transport: str = "tcp") -> Plan:
    layout = Layout(((0,), (1,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 2), (1,))), 1, 2),))
    return plan_of(layout, seq_len=8, transport=transport)


def on_hosts(found: Plan, *hosts: str) -> Plan:
    return replace(found, ranks=tuple(replace(r, host=h) for r, h in zip(found.ranks, hosts, strict=True)))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_demo_needs_a_disk_and_nothing_else(transport: str) -> None:
    assert needed(plan(transport), EMULATED) == {"host.disk"}


def test_rdma_is_looked_at_only_where_something_goes_over_it() -> None:
    ids = needed(on_hosts(plan("rdma"), "a", "b"), EMULATED)
    assert {"rdma.gid", "lim.memlock", "net.mtu"} <= ids
    assert not {"rdma.peer_mem", "rdma.plugin"} & ids
    over = tuple(PlannedGroup(f"g{i}", "data", (0, 1), "nccl", net) for i, net in enumerate(("plugin", "socket")))  # type: ignore[arg-type]
    assert "rdma.plugin" in needed(replace(plan("tcp"), groups=over), EMULATED)
    assert "rdma.plugin" not in needed(replace(plan("tcp"), groups=over[1:]), EMULATED)
    assert "rdma.peer_mem" in needed(plan("direct"), EMULATED)
    assert not {i for i in needed(on_hosts(plan("tcp"), "a", "b"), EMULATED) if i.startswith(("rdma", "gpu"))}


def test_this_machine_passes_in_no_time(tmp_path: Path) -> None:
    preflight(plan(), EMULATED, folder=tmp_path)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        findings = preflight(plan(), EMULATED, folder=tmp_path / "new" / "runs")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3 * busy()
    assert [(f.check, f.state) for f in findings] == [("host.disk", "ok")]
    assert exit_code(findings) == 0
    refuse_on_failures(findings)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_checkpoint_folder_that_cannot_be_written_is_refused() -> None:
    findings = preflight(plan(), EMULATED, folder=Path("/proc/self"))
    with pytest.raises(WorkFailed) as refusal:
        refuse_on_failures(findings)
    assert "host.disk" in refusal.value.message
    assert "--skip-checks" in refusal.value.hint


def test_a_plan_over_libfabric_is_refused_without_its_plugin_unless_a_person_says_where_it_is() -> None:
    efa = healthy_hosts.every_nic(driver="efa", pci_id="1d0f:efa1", link_layer=None, sm_lid=None, gids=())
    cluster = build(healthy_hosts.reports(node0=efa, node1=efa)).cluster
    over = replace(plan(), groups=(PlannedGroup("g", "data", (0, 1), "nccl", "plugin"),))
    failed = [f for f in preflight(on_hosts(over, "node0", "node1"), cluster, folder=Path("/tmp")) if f.state == "fail"]
    assert {(f.check, f.host) for f in failed} == {("rdma.plugin", "node0"), ("rdma.plugin", "node1")}
    assert "efa_installer.sh -y # on node0" in failed[0].fix
    access = Access("a", env={"NCCL_NET_PLUGIN": "ofi"})
    named = replace(cluster, hosts=tuple(replace(h, access=access) for h in cluster.hosts))
    found = preflight(on_hosts(over, "node0", "node1"), named, folder=Path("/tmp"))
    assert [f.check for f in found if f.state == "fail"] == []


def test_other_hosts_are_judged_by_what_discovery_found() -> None:
    ill = healthy_hosts.nic(-1, mtu=1500)
    cluster = build(healthy_hosts.reports(node2=ill)).cluster
    assert cluster.host_by_name["node2"].facts == facts_to_data(healthy_hosts.reports(node2=ill)[2].facts)  # type: ignore[arg-type]
    findings = preflight(on_hosts(plan(), "node0", "node2"), cluster, folder=Path("/tmp"))
    assert [(f.check, f.host) for f in findings if f.state == "fail"] == [("net.mtu", "node2")]
    with pytest.raises(WorkFailed) as refusal:
        refuse_on_failures(findings, {"node0", "node2"})
    assert refusal.value.hint.endswith("; then discover the cluster again, or --skip-checks")
