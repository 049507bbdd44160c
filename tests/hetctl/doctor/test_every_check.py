"""For every check one case of every state it can reach: what fails is named by that check, and nothing else fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hetctl.comm.contract.fabric_facts import FabricReport, SubnetManager
from hetctl.comm.contract.facts import Address, Folder, HostFacts, Library, ToolRun
from hetctl.console import Sink
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import CheckedCluster, ReachAttempt
from hetctl.doctor.registry import BY_ID, CHECKS
from hetctl.doctor.runner import first_of, judge
from hetctl.doctor.tables import show_check
from hetctl.doctor.verdict import State
from tests.hetctl.doctor.healthy_hosts import (
    GiB,
    all_of,
    checked,
    computed,
    every_nic,
    every_port,
    gpu,
    health,
    limit,
    measured,
    nic,
    port,
    process,
    python,
    rdma,
    reports,
    setting,
    silent,
    system,
    variable,
)

Edit = Callable[[HostFacts], HostFacts]
Change = Callable[[CheckedCluster], CheckedCluster]


@dataclass(frozen=True)
class Row:
    """One illness: who has it, and what the check must say."""

    check: str
    state: State
    ill: Mapping[str, Edit] = field(default_factory=dict)
    change: Change = lambda found: found
    hosts: int = 4
    silent: tuple[str, str] = ("", "")
    others: tuple[str, ...] = ()  # checks that must fail with it, because they are the same thing seen twice

    def __str__(self) -> str:
        who = ",".join(self.ill) or self.silent[1] or "all"
        return f"{self.check}-{self.state}-{who}"


efa = every_nic(driver="efa", pci_id="1d0f:efa1", link_layer=None, sm_lid=None, gids=())


def with_plugin(facts: HostFacts) -> HostFacts:
    return rdma(libraries=(*(facts.rdma.libraries or ()), Library("libnccl-net-ofi.so")))(facts)


def one(check: str, state: State, edit: Edit, host: str = "node1") -> Row:
    return Row(check, state, {host: edit})


def after(check: str, state: State, change: Change, **more: Any) -> Row:
    return Row(check, state, change=change, **more)


def of_report(name: str, **values: Any) -> Change:
    def change(found: CheckedCluster) -> CheckedCluster:
        return replace(found, reports=tuple(replace(r, **values) if r.name == name else r for r in found.reports))

    return change


def lost(*, alive: bool, target: str | None = None, source: str | None = None, problem: str = "no answer") -> Change:
    def change(found: CheckedCluster) -> CheckedCluster:
        tried = tuple(
            replace(t, problem=problem, alive=alive)
            if (target is None or t.target == target) and (source is None or t.source == source)
            else t
            for t in found.tried or ()
        )
        return replace(found, tried=tried)

    return change


def device(host: str, **values: Any) -> Change:
    """Change what the first device of a host measured."""

    def change(found: CheckedCluster) -> CheckedCluster:
        mine = computed(found.facts[host])
        devices = [{**mine["devices"][0], **values}, *mine["devices"][1:]]
        return replace(found, performance={**found.performance, host: {**mine, "devices": devices}})

    return change


def figure(**values: float | None) -> list[dict[str, Any]]:
    """The numerics of a device with one figure replaced."""
    exact = {"max_eps": 2.0, "mean_eps": 0.2, "scale_eps": 0.0, "cosine": 1.0}
    row = {"operation": "matmul", "dtype": "bfloat16", "backward": exact, "sample": [1.0, -2.0]}
    return [{**row, "forward": {**exact, **values}}]


def rates(*values: float) -> Change:
    return lambda found: replace(found, cluster=replace(found.cluster, measured=tuple(measured(values))))


def unmeasured(found: CheckedCluster) -> CheckedCluster:
    return replace(found, cluster=replace(found.cluster, measured=()))


def no_way(found: CheckedCluster) -> CheckedCluster:
    links = tuple(
        replace(k, transports=tuple(replace(w, usable=False) for w in k.transports)) for k in found.cluster.links
    )
    return replace(found, cluster=replace(found.cluster, links=links))


def no_interface(found: CheckedCluster) -> CheckedCluster:
    """No interface is known to hold a host's data address, so its ranks are told none."""
    hosts = tuple(replace(h, data_address="192.0.2.99") for h in found.cluster.hosts)
    return replace(found, cluster=replace(found.cluster, hosts=hosts))


def bonded(*carriers: bool | None) -> Edit:
    """The management port as a bond over two members with these carriers."""

    def edit(facts: HostFacts) -> HostFacts:
        bond = replace(facts.nics[-1], name="bond0", netdev="bond0", bond_members=("m0", "m1"), pci=None, carrier=True)
        members = tuple(
            replace(facts.nics[-1], name=f"m{i}", netdev=f"m{i}", bond="bond0", carrier=c, addresses=())
            for i, c in enumerate(carriers)
        )
        return replace(facts, nics=(*facts.nics[:-1], bond, *members))

    return edit


def twin(facts: HostFacts) -> HostFacts:
    """A second interface in the management network."""
    other = replace(facts.nics[-1], name="eno2", netdev="eno2", addresses=(Address("192.168.0.99", 24, "global"),))
    return replace(facts, nics=(*facts.nics, other))


def no_gids(facts: HostFacts) -> HostFacts:
    return every_nic(gids=tuple(replace(g, type="roce_v1") for g in facts.nics[0].gids))(facts)


def local_gids(facts: HostFacts) -> HostFacts:
    return every_nic(gids=tuple(g for g in facts.nics[0].gids if g.link_local))(facts)


def untyped_gids(facts: HostFacts) -> HostFacts:
    return every_nic(gids=tuple(replace(g, type=None) for g in facts.nics[0].gids))(facts)


def folder(**values: Any) -> Edit:
    return system(folders=(replace(Folder("/ck", "/ck", 100 * GiB, 50 * GiB, 1000, 500, 0.01), **values),))


def slow_link(port: int, gigabit: float, text: str) -> Edit:
    return nic(port, rate_bytes_per_s=gigabit * 1e9 / 8, rate_text=text)


UNPLUGGED = {"state": "down", "physical_state": "disabled", "carrier": False}  # as RoCE drivers say it


def master(guid: str, lid: int = 1, state: str = "master") -> tuple[SubnetManager, ...]:
    return (SubnetManager(lid, guid, 14, state),)


def watched(**growing: int) -> Edit:
    """What the first port's counters grew by in 2 s."""

    def edit(facts: HostFacts) -> HostFacts:
        return all_of(nic(0, growing=growing), port(0, watched_s=2.0))(facts)

    return edit


def of_prefix(prefix: str, **values: Any) -> Edit:
    return every_nic(subnet_prefix=prefix, **values)


def path(**values: Any) -> Change:
    return lambda found: replace(found, paths=(replace(found.paths[0], **values),))


OWN = "fec0:0000:0000:0001"
UNASKED = {"managers": "sminfo needs permission for /dev/infiniband/umad*"}
RAILS = all_of(port(0, managers=master("0xa")), port(1, managers=master("0xb")))
MIG = {"mode": "mig", "instances": ()}
CASES: tuple[Row, ...] = (
    Row("ssh.reach", "fail", silent=("node1", "connection-refused")),
    after("ssh.reach", "warn", of_report("node1", seconds=9.0)),
    Row("ssh.reach", "unknown", silent=("node1", "unknown-host-key"), others=("ssh.hostkey",)),
    Row("ssh.hostkey", "fail", silent=("node1", "unknown-host-key")),
    Row("ssh.hostkey", "fail", silent=("node1", "host-key-changed")),
    Row("ssh.hostkey", "unknown", silent=("node1", "timeout"), others=("ssh.reach",)),
    Row("sw.interpreter", "fail", silent=("node1", "no-python")),
    Row("sw.interpreter", "fail", silent=("node1", "python-unsupported")),
    one("sw.interpreter", "fail", python(version="3.10.2")),
    Row("sw.interpreter", "unknown", silent=("node1", "timeout"), others=("ssh.reach",)),
    one("host.name", "warn", system(addresses=("127.0.1.1",))),
    one("host.name", "warn", system(addresses=None)),
    Row("host.name", "fail", {"node1": system(addresses=("127.0.1.1",))}, change=no_interface, others=("net.ifname",)),
    one("host.name", "warn", system(addresses=("10.9.9.9",))),
    one("host.name", "warn", system(addresses=("127.0.0.1", "192.168.0.2"))),
    one("net.ifname", "fail", variable("GLOO_SOCKET_IFNAME", "docker0")),
    one("net.ifname", "fail", variable("NCCL_SOCKET_IFNAME", "=lo")),
    one("net.ifname", "fail", variable("GLOO_SOCKET_IFNAME", "^lo,docker")),
    one("net.ifname", "warn", variable("NCCL_SOCKET_IFNAME", "ib0")),
    one("net.mtu", "fail", nic(-1, mtu=1500)),
    Row("net.mtu", "warn", {"node2": every_nic(mtu=1500), "node3": every_nic(mtu=1500)}),
    one("net.mtu", "unknown", nic(-1, mtu=None)),
    Row("net.speed", "fail", {"node2": nic(-1, carrier=False)}, others=("island.ways",)),
    one("net.speed", "warn", slow_link(-1, 1, "")),
    one("net.speed", "unknown", nic(-1, rate_bytes_per_s=None)),
    one("net.flaps", "warn", nic(-1, carrier_changes=400)),
    one("net.flaps", "unknown", all_of(nic(-1, carrier_changes=None))),
    one("net.subnet", "fail", twin),
    one("net.subnet", "warn", all_of(twin, system(policy_rules=None))),
    one("net.subnet", "ok", all_of(twin, system(policy_rules=2))),
    one("net.ports", "warn", setting("ip_local_port_range", "40000\t41000")),
    one("net.ports", "unknown", setting("ip_local_port_range", None)),
    after("ssh.peer", "fail", lost(alive=False, target="node1")),
    after("ssh.peer", "fail", lost(alive=False, source="node1")),
    after("ssh.peer", "warn", lost(alive=False, target="node1", source="node0")),
    after("ssh.peer", "unknown", lambda found: replace(found, tried=None)),
    after("net.firewall", "fail", lost(alive=True, target="node1", problem="Connection refused")),
    after("net.firewall", "fail", lambda found: replace(found, listening={"node1": "Permission denied"})),
    after("net.firewall", "unknown", lambda found: replace(found, tried=None)),
    after(
        "net.path_mtu",
        "fail",
        lambda found: replace(
            found, tried=(*(found.tried or ()), ReachAttempt("node0", "node1", "x", 1, largest_packet=False))
        ),
    ),
    after(
        "net.path_mtu",
        "unknown",
        lambda found: replace(found, tried=tuple(replace(t, largest_packet=None) for t in found.tried or ())),
    ),
    one("lim.memlock", "fail", rdma(memlock_bytes=8 * 2**20)),
    one("lim.memlock", "warn", rdma(memlock_bytes=64 * GiB)),
    one("lim.memlock", "unknown", rdma(memlock_bytes=None)),
    one("lim.nofile", "fail", limit("nofile", 1024)),
    one("lim.nofile", "warn", limit("nofile", 8192)),
    one("lim.nofile", "unknown", limit("nofile", None)),
    one("lim.nproc", "fail", limit("nproc", 1024)),
    one("lim.nproc", "warn", limit("nproc", 8192)),
    one("lim.nproc", "unknown", limit("nproc", None)),
    one("rdma.port_state", "fail", nic(0, state="down", physical_state="polling", rate_bytes_per_s=None)),
    Row(
        "rdma.port_state",
        "warn",
        {f"node{n}": nic(0, state="down", physical_state="polling", rate_bytes_per_s=None) for n in range(4)},
    ),
    one("rdma.port_state", "ok", nic(0, state="down", physical_state="disabled", rate_bytes_per_s=None)),
    one("rdma.port_state", "fail", nic(0, **UNPLUGGED), "node2"),
    one("rdma.port_state", "warn", nic(0, **UNPLUGGED, addresses=()), "node2"),
    one("rdma.port_state", "ok", nic(0, **{**UNPLUGGED, "admin_up": False}), "node2"),
    one("rdma.port_state", "unknown", nic(0, state=None)),
    one("rdma.sm", "fail", nic(0, state="init", sm_lid=0)),
    one("rdma.sm", "fail", nic(0, sm_lid=0)),
    one("rdma.sm", "unknown", nic(0, sm_lid=None)),
    Row("rdma.sm", "unknown", {f"node{n}": every_port(managers=None, unasked=UNASKED) for n in (0, 1)}),
    one("rdma.sm", "ok", every_port(managers=None, unasked=UNASKED)),  # the other host may ask
    one("rdma.sm", "fail", every_port(managers=master("0xb"))),  # one device, two masters
    Row("rdma.sm", "fail", {"node0": of_prefix(OWN), "node1": of_prefix(OWN, sm_lid=7)}),
    Row("rdma.sm", "warn", {"node0": RAILS, "node1": RAILS}),
    Row("rdma.sm", "warn", {f"node{n}": every_port(managers=master("0xa", state="standby")) for n in (0, 1)}),
    one("rdma.sm", "warn", nic(0, sm_lid=7)),
    one("rdma.lid", "fail", nic(0, lid=0)),
    one("rdma.lid", "unknown", nic(0, lid=None)),
    one("rdma.lid", "warn", nic(0, lid=1)),  # node0's, which ends that network: no way over it
    one("rdma.lid", "ok", nic(0, lid=1, virtual_function=True)),
    one("rdma.lid", "warn", port(0, lmc=2)),
    one("rdma.pkey", "fail", port(0, pkeys=(0x8001,))),
    Row("rdma.pkey", "fail", {"node0": every_port(pkeys=(0x7FFF,)), "node1": port(0, pkeys=(0x7FFF,))}),
    one("rdma.pkey", "warn", every_port(pkeys=(0x7FFF,))),
    one("rdma.pkey", "warn", port(0, pkeys=(0x8001, 0xFFFF))),
    one("rdma.pkey", "ok", port(0, pkeys=(0xFFFF, 0x8001))),
    one("rdma.pkey", "unknown", port(0, pkeys=None)),
    one("rdma.mtu", "warn", nic(0, rdma_mtu=2048)),
    Row("rdma.mtu", "warn", {f"node{n}": every_nic(rdma_mtu=2048) for n in (0, 1)}),
    one("rdma.mtu", "ok", all_of(nic(0, mtu=1500), nic(0, rdma_mtu=4096)), "node0"),
    one("rdma.mtu", "warn", nic(0, rdma_mtu=1024), "node2"),
    one("rdma.mtu", "unknown", nic(0, rdma_mtu=None)),
    after("rdma.paths", "fail", path(problem="no route")),
    after("rdma.paths", "warn", path(rate_bytes_per_s=12.5e9)),
    after("rdma.paths", "warn", path(mtu=2048)),
    after("rdma.paths", "unknown", path(problem="ibtracert and saquery are not installed", switches=None, mtu=None)),
    after("rdma.paths", "unknown", lambda found: replace(found, paths=())),
    one("rdma.ibdiagnet", "ok", rdma(report=FabricReport("/x", None, {"Links Check": (3, 0)}))),
    one("rdma.ibdiagnet", "warn", rdma(report=FabricReport("/x", "2024-05-01", {"Speed / Width checks": (0, 15)}))),
    one("rdma.rate", "warn", slow_link(0, 200, "200 Gb/sec (4X HDR)")),
    one("rdma.rate", "fail", slow_link(0, 10, "10 Gb/sec (4X SDR)")),
    one("rdma.rate", "unknown", nic(0, rate_bytes_per_s=None)),
    one("rdma.gid", "fail", no_gids, "node2"),
    one("rdma.gid", "fail", local_gids, "node2"),  # node3 has routable ones
    Row("rdma.gid", "warn", {"node2": local_gids, "node3": local_gids}),
    one("rdma.gid", "unknown", untyped_gids, "node2"),
    one("rdma.gid_env", "fail", variable("NCCL_IB_GID_INDEX", "7"), "node2"),
    one("rdma.gid_env", "warn", variable("NCCL_IB_GID_INDEX", "2"), "node2"),
    one("rdma.gid_env", "ok", variable("NCCL_IB_GID_INDEX", "3"), "node2"),
    Row("rdma.linklayer_mix", "warn", {"node1": every_nic(link_layer="ethernet", gids=())}, others=("rdma.gid",)),
    one("rdma.linklayer_mix", "fail", all_of(lambda f: replace(f, nics=f.nics[-1:]), variable("NCCL_NET", "IB"))),
    one("rdma.hca_vendor_mix", "warn", nic(0, pci_id="14e4:1760")),
    one("rdma.bond", "fail", bonded(False, False)),
    one("rdma.bond", "unknown", bonded(None, None)),
    one("rdma.slaves", "warn", bonded(True, False)),
    one("rdma.slaves", "unknown", bonded(None, None)),
    one("rdma.counters", "fail", nic(0, growing={"symbol_error": 4})),
    one("rdma.counters", "warn", nic(0, counters={"link_downed": 3})),
    one("rdma.counters", "unknown", nic(0, counters={}), "node2"),
    one("rdma.counters", "warn", watched(packet_seq_err=60)),
    one("rdma.counters", "ok", watched(packet_seq_err=6, np_cnp_sent=2)),
    one("rdma.counters", "warn", watched(port_xmit_constraint_errors=1)),
    one("rdma.credits", "fail", watched(port_xmit_discards=1)),
    one("rdma.credits", "warn", watched(port_xmit_wait=2_500_000_000)),  # 10 of 100 GB of 2 s at 400 Gbit/s
    one("rdma.credits", "ok", watched(port_xmit_wait=1_000_000)),
    one("rdma.credits", "unknown", nic(0, counters={"symbol_error": 0})),
    one("rdma.credits", "unknown", port(0, watched_s=None)),
    one("rdma.credits", "unknown", nic(0, counters={"port_xmit_wait": 2**32 - 1})),
    one("roce.pfc_ecn", "fail", nic(0, growing={"rx_roce_discards": 9}), "node2"),
    one("roce.pfc_ecn", "unknown", all_of(nic(0, counters={"np_cnp_sent": 0}), port(0, pfc=None)), "node2"),
    one("roce.pfc_ecn", "ok", all_of(nic(0, counters={"np_cnp_sent": 1}), port(0, pfc=None)), "node2"),
    one("roce.pfc_ecn", "warn", port(0, pfc=(4,)), "node2"),
    Row("roce.pfc_ecn", "warn", {f"node{n}": every_port(pfc=()) for n in (2, 3)}),
    one("roce.pfc_ecn", "warn", watched(rx_prio3_pause=5000), "node2"),
    one("roce.pfc_ecn", "warn", watched(rx_prio3_pause_duration=400_000), "node2"),
    one("roce.pfc_ecn", "warn", watched(tx_pfc_ena_frames_pri3=5000), "node2"),
    one("roce.pfc_ecn", "warn", watched(np_cnp_sent=5000), "node2"),
    one("roce.pfc_ecn", "warn", watched(rx_prio0_discards=50), "node2"),
    one("roce.pfc_ecn", "ok", watched(rx_prio3_pause=10, rx_prio3_pause_duration=900), "node2"),
    one("rdma.peer_mem", "fail", rdma(peer_memory_modules=(), dma_buf=False)),
    one("rdma.peer_mem", "warn", rdma(peer_memory_modules=(), dma_buf=None)),
    one("rdma.peer_mem", "unknown", rdma(peer_memory_modules=None, dma_buf=None)),
    one("rdma.plugin", "fail", efa),
    Row("rdma.plugin", "warn", {"node0": efa}, hosts=1),
    one("rdma.plugin", "ok", all_of(efa, variable("NCCL_NET_PLUGIN", "ofi"))),
    one("rdma.plugin", "ok", all_of(efa, with_plugin)),
    one("rdma.plugin", "warn", all_of(efa, with_plugin, rdma(fabric_providers=("shm", "tcp")))),
    one("rdma.libs", "fail", rdma(libraries=())),
    one("rdma.libs", "warn", rdma(providers=("mlx5",)), "node2"),
    one("rdma.libs", "ok", every_nic(rdma_device="roceP2p1s0"), "node2"),  # renamed: its driver still tells
    one("rdma.libs", "unknown", every_nic(rdma_device="roceP2p1s0", driver="strange"), "node2"),
    one("rdma.libs", "unknown", rdma(libraries=None)),
    one("rdma.libs", "unknown", rdma(providers=None), "node2"),
    one("gpu.count", "warn", lambda f: replace(f, foreign={"Ascend 910B": 8})),
    one("gpu.count", "fail", lambda f: replace(f, gpus=(), vendors={**f.vendors, "nvidia": "2 on the PCI bus"})),
    one("gpu.count", "warn", variable("CUDA_VISIBLE_DEVICES", "0")),
    one("gpu.count", "unknown", lambda f: replace(f, gpus=(), vendors={})),
    one("gpu.usable", "fail", gpu(problem="GPU is lost")),
    after("gpu.liveness", "fail", device("node1", finite=False)),
    after("gpu.liveness", "fail", device("node1", problem="it did not answer within 15 s")),
    after("gpu.liveness", "warn", device("node1", alive_s=12.0)),
    after("gpu.liveness", "unknown", lambda found: replace(found, performance={})),
    one("gpu.smi_latency", "fail", system(tools={"smi": ToolRun(15.0, "timed out after 15.0 s")})),
    one("gpu.smi_latency", "warn", system(tools={"smi": ToolRun(3.0)})),
    one("gpu.smi_latency", "unknown", system(tools={})),
    one("gpu.pcie", "fail", lambda f: gpu(pcie=replace(f.gpus[0].pcie, width=8))(f)),
    one("gpu.pcie", "ok", lambda f: gpu(pcie=replace(f.gpus[0].pcie, speed_gt_per_s=2.5))(f)),
    one("gpu.pcie", "unknown", lambda f: gpu(pcie=replace(f.gpus[0].pcie, width=None))(f)),
    one("gpu.ecc_ras", "fail", health(ecc_uncorrected=1)),
    one("gpu.ecc_ras", "fail", health(remap_failed=True)),
    one("gpu.ecc_ras", "warn", health(ecc_corrected=12)),
    one("gpu.ecc_ras", "warn", health(rows_pending=True)),
    one("gpu.ecc_ras", "unknown", health(ecc_corrected=None, ecc_uncorrected=None, remap_failed=None)),
    one("gpu.recovery_action", "fail", health(recovery_action="GPU Reset")),
    one("gpu.recovery_action", "warn", health(recovery_action="Drain P2P")),
    one("gpu.recovery_action", "unknown", health(recovery_action=None)),
    one("gpu.xid", "fail", system(kernel_log=("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus",))),
    one("gpu.xid", "warn", system(kernel_log=("NVRM: Xid (PCI:0000:18:00): 13, Graphics Exception",))),
    one("gpu.xid", "unknown", system(kernel_log=None)),
    one("gpu.ras_log", "fail", system(kernel_log=("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",)), "node2"),
    one("gpu.ras_log", "warn", system(kernel_log=("amdgpu 0000:c1:00.0: [gfxhub0] page fault",)), "node2"),
    one("gpu.ras_log", "unknown", system(kernel_log=None), "node2"),
    one("gpu.foreign_procs", "fail", process(40)),
    one("gpu.foreign_procs", "warn", process(1)),
    one("gpu.foreign_procs", "unknown", gpu(processes=None)),
    one("gpu.throttle", "fail", health(throttle_reasons=("hw_thermal_slowdown",))),
    one("gpu.throttle", "warn", health(throttle_reasons=("sw_power_cap",))),
    one("gpu.throttle", "unknown", health(throttle_reasons=None)),
    one("gpu.power", "warn", health(power_limit_w=500.0)),
    one("gpu.power", "unknown", health(power_limit_w=None)),
    one("gpu.fabric", "fail", health(links_down=2)),
    one("gpu.fabric", "fail", health(fabric_state="In Progress")),
    one("gpu.fabric", "unknown", health(links_up=None, links_down=None, fabric_state=None)),
    one("gpu.partition", "fail", lambda f: gpu(partition=replace(f.gpus[0].partition, **MIG))(f)),
    one("gpu.partition", "warn", lambda f: gpu(partition=replace(f.gpus[0].partition, mode="cpx"))(f), "node2"),
    Row(
        "gpu.partition",
        "unknown",
        {
            f"node{n}": lambda f: replace(
                f, gpus=tuple(replace(g, partition=replace(g.partition, mode=None, memory_mode=None)) for g in f.gpus)
            )
            for n in (0, 1)
        },
    ),
    one("sw.build", "fail", python(torch=None)),
    one("sw.build", "fail", python(torch="2.13.0+cpu", cuda=None)),
    Row("sw.build", "fail", {f"node{n}": python(torch="2.9.1", cuda="12.8") for n in (0, 1)}),
    one("sw.build", "unknown", lambda f: replace(f, interpreters=())),
    one("sw.match", "fail", python(torch="2.12.1+cu128")),
    one("sw.match", "warn", python(nccl="2.26.1")),
    one("sw.match", "warn", lambda f: replace(f, gpus=tuple(replace(g, driver="555.1") for g in f.gpus))),
    Row("sw.match", "warn", {f"node{n}": python(torch="2.12.0+rocm6.4") for n in (2, 3)}),
    Row("sw.match", "unknown", {f"node{n}": lambda f: replace(f, interpreters=()) for n in range(4)}),
    one("env.debug_leftovers", "fail", variable("NCCL_IB_DISABLE", "1")),
    one("env.debug_leftovers", "fail", variable("HSA_OVERRIDE_GFX_VERSION", "9.4.2"), "node2"),
    one("env.debug_leftovers", "warn", variable("NCCL_P2P_DISABLE", "1")),
    one("env.debug_leftovers", "warn", setting("nccl.conf", "NCCL_DEBUG=INFO")),
    one("host.shm", "fail", system(shm_total_bytes=64 * 2**20)),
    one("host.shm", "warn", system(shm_total_bytes=GiB)),
    one("host.shm", "unknown", system(shm_total_bytes=None)),
    one("host.numa_balancing", "warn", setting("numa_balancing", "1")),
    one("host.numa_balancing", "unknown", setting("numa_balancing", None)),
    one("host.iommu", "fail", setting("iommu_types", "DMA identity")),
    one("host.iommu", "warn", all_of(setting("iommu_types", "DMA"), setting("sys_vendor", "QEMU"))),
    one("host.iommu", "unknown", setting("cmdline", "quiet")),
    one("host.acs", "fail", setting("acs", "on at 3 of 9 bridges")),
    one("host.acs", "warn", all_of(setting("acs", "on at 3 of 9 bridges"), setting("sys_vendor", "QEMU"))),
    one("host.acs", "unknown", setting("acs", None)),
    one("host.pci_realloc", "unknown", all_of(setting("cmdline", None), setting("iommu_types", "identity"))),
    one("host.governor", "warn", setting("scaling_governor", "powersave")),
    one("host.governor", "unknown", setting("scaling_governor", None)),
    one("host.thp", "unknown", setting("transparent_hugepage", None)),
    one("host.swap", "warn", setting("swaps", "/swapfile")),
    one("host.swap", "unknown", setting("swaps", None)),
    after("host.clock", "fail", of_report("node1", clock_ahead_s=(3599.9, 3600.1))),
    after("host.clock", "warn", of_report("node1", clock_ahead_s=(-5.1, -4.9))),
    one("host.clock", "warn", system(clock_synchronized=False)),
    one("host.clock", "unknown", system(clock_synchronized=None)),
    after("host.clock", "unknown", of_report("node1", clock_ahead_s=None)),
    one("host.disk", "fail", folder(problem="Read-only file system")),
    one("host.disk", "fail", folder(free_bytes=GiB)),
    one("host.disk", "fail", folder(free_files=3)),
    one("host.disk", "warn", folder(free_bytes=8 * GiB)),
    one("host.disk", "unknown", folder(free_bytes=None)),
    one("host.disk", "unknown", system(folders=())),
    after("host.sharedfs", "fail", lambda found: replace(found, shared={"/data": {"node0": "", "node1": "absent"}})),
    after("host.sharedfs", "unknown", lambda found: replace(found, shared={"/data": {"node1": "Stale file handle"}})),
    after("perf.gemm", "fail", device("node1", gemm_flops=2e14)),
    after("perf.gemm", "warn", device("node1", gemm_flops=5e14)),
    after("perf.gemm", "unknown", device("node1", gemm_flops=None)),
    after("perf.hbm", "fail", device("node1", memory_bytes_per_s=1e12)),
    after("perf.hbm", "warn", device("node1", memory_bytes_per_s=3.4e12)),
    after("perf.hbm", "unknown", device("node1", memory_bytes_per_s=None)),
    after(
        "perf.allreduce",
        "fail",
        lambda w: replace(
            w, performance={**w.performance, "node1": {**w.performance["node1"], "allreduce_bytes_per_s": 1e10}}
        ),
    ),
    after(
        "perf.allreduce",
        "warn",
        lambda w: replace(
            w, performance={**w.performance, "node1": {**w.performance["node1"], "allreduce_bytes_per_s": 1.2e11}}
        ),
    ),
    after(
        "perf.allreduce",
        "unknown",
        lambda w: replace(
            w, performance={**w.performance, "node1": {**w.performance["node1"], "allreduce_bytes_per_s": None}}
        ),
    ),
    after("perf.numerics", "fail", device("node1", numerics=figure(scale_eps=1.3))),
    after("perf.numerics", "fail", device("node1", numerics=figure(max_eps=None))),
    after("perf.numerics", "fail", device("node1", numerics=figure(cosine=0.9))),
    after("perf.numerics", "unknown", device("node1", numerics=None)),
    after("perf.pair", "fail", rates(1e9, 1e9, 1e8)),
    after("perf.pair", "warn", rates(1e9, 1e9, 6e8)),
    after("perf.pair", "unknown", unmeasured),
    after("island.ways", "fail", no_way),
)


def examined(row: Row) -> CheckedCluster:
    found: list[Report] = reports(row.hosts, **row.ill)
    if row.silent[0]:
        found = silent(*row.silent, found)
    return row.change(checked(found))


@pytest.mark.parametrize("row", CASES, ids=str)
def test_the_check_says_so_and_no_other_fails(row: Row) -> None:
    findings = judge(examined(row), CHECKS)
    states = {f.state for f in findings if f.check == row.check}
    assert states == {"ok"} if row.state == "ok" else row.state in states, [
        (f.host, f.state, f.reason) for f in findings if f.check == row.check
    ]
    failed = {f.check for f in findings if f.state == "fail"}
    assert failed == set(row.others) | ({row.check} if row.state == "fail" else set())


@pytest.mark.parametrize("row", [r for r in CASES if r.state == "fail"], ids=str)
def test_what_failed_is_named_first_with_a_host_and_a_line_to_paste(row: Row) -> None:
    first = first_of(judge(examined(row), CHECKS))
    assert first is not None
    assert (first.check, first.state) == (row.check, "fail")
    assert first.reason
    assert "{" not in first.fix.replace("hosts: {", "").replace(": {python", "")


def test_every_check_has_a_case_and_says_how_it_reads() -> None:
    assert {row.check for row in CASES} == set(BY_ID)
    for check in CHECKS:
        assert check.reads
        assert check.source
        assert (check.rule is None) != (check.survey is None)


def test_what_can_fail_says_what_to_type() -> None:
    for row in (r for r in CASES if r.state in ("fail", "warn") and r.check != "host.pci_realloc"):
        found = [f for f in judge(examined(row), [BY_ID[row.check]]) if f.state == row.state]
        if row.check not in ("ssh.reach", "island.ways"):
            assert all(f.fix for f in found), row


def test_an_estimate_is_no_reference() -> None:
    """One host with a product of no row: its speed is shown, and judged by nothing, as nothing is known of it."""

    def strange(facts: HostFacts) -> HostFacts:
        return replace(facts, gpus=tuple(replace(g, name="NVIDIA Z9000", pci_id=None) for g in facts.gpus))

    slow = examined(replace(one("perf.gemm", "ok", strange, "node0"), hosts=1, change=device("node0", gemm_flops=1e12)))
    [finding] = judge(slow, [BY_ID["perf.gemm"]])
    assert finding.state == "ok", finding.reason
    assert [d.device_class for d in slow.cluster.hosts[0].devices] == ["z9000"] * 2


def test_a_check_that_breaks_is_unknown_and_says_why() -> None:
    broken = replace(BY_ID["host.thp"], rule=lambda case: 1 / 0)  # type: ignore[arg-type, return-value]
    [finding, *_] = judge(checked(reports()), [broken])
    assert finding.state == "unknown"
    assert "ZeroDivisionError" in finding.reason


def test_a_stray_subnet_manager_is_that_of_its_host() -> None:
    strays = [
        f for f in judge(examined(one("rdma.sm", "warn", nic(0, sm_lid=7))), [BY_ID["rdma.sm"]]) if f.state == "warn"
    ]
    assert [f.host for f in strays] == ["node1"]


def test_hosts_that_did_not_answer_are_judged_once() -> None:
    findings = judge(checked(silent("node1", "timeout", reports())), CHECKS)
    about = [f for f in findings if f.host == "node1"]
    assert {f.check for f in about} == {"ssh.reach", "ssh.hostkey", "sw.interpreter"}


def test_the_same_finding_of_two_vendors_has_each_its_own_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    """No torch on any host: an NVIDIA host must not be the one whose line stands for AMD's."""
    row = Row("sw.build", "fail", {f"node{n}": python(torch=None) for n in range(4)})
    show_check(Sink(), judge(examined(row), [BY_ID["sw.build"]]))
    said = capsys.readouterr().out
    assert said.count("whl/cu128") == said.count("whl/rocm7.2") == 1
    assert "on node0" in said
