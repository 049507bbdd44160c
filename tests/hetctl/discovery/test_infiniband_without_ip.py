"""InfiniBand ports that work while no IP runs over them, as on pure InfiniBand clusters: discovered, planned, checked.

The state is that of imbue-ai/cluster-health#4 (ibdev2netdev says "Down" of ports that are Active at 400 Gbit/s).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster, load_cluster
from hetctl.comm.contract.facts import Address, GpuFacts
from hetctl.discovery.fabric import Report, build
from hetctl.discovery.links import lanes_between
from hetctl.doctor.check import Finding
from hetctl.doctor.registry import BY_ID
from hetctl.doctor.runner import judge
from hetctl.probe import remote as program
from hetctl.probe.capture import Recording, write_capture
from hetctl.probe.raw import Options, Raw, load
from hetctl.probe.wanted import request
from tests.hetctl.discovery.test_fabric import ethernet, green, host, ib, red, way
from tests.hetctl.doctor.healthy_hosts import Edit, all_of, checked, every_nic, reports
from tests.rigs.dress import Costume, dress_host

MANAGEMENT = "192.168.0.{}"


def raw_of(folder: Path, **more: Any) -> Raw:
    """A dressed host whose processes may lock memory and have an engine, whatever machine is below the dress."""
    dress = dress_host(folder, Costume(tool_delay_s=0, **more))
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))
    python = {"path": "python3", "packages": {"nixl": "1.5"}, "files": {}, "libraries": []}
    return replace(raw, values={**raw.values, "limits": {"memlock": ["unlimited"] * 2}}, interpreters=(python,))


def discovered(folder: Path, **more: Any) -> Path:
    """The cluster file of 8 x H200 and 8 x MI325X, through a capture, as `hetctl discover` writes it."""
    hosts = []
    for number, vendor in enumerate(("nvidia", "amd")):
        management = {"eno1": MANAGEMENT.format(number + 1)}
        raw = raw_of(folder / vendor, name=vendor, number=number, vendor=vendor, management=management, **more)
        hosts.append(Recording(vendor, raw, address=management["eno1"]))
    write_capture(folder / "hosts.tgz", hosts, salt=b"fixed")
    file = folder / "cluster.yaml"
    hetctl("discover", "--from-capture", str(folder / "hosts.tgz"), "-o", str(file))
    return file


def hetctl(*words: str) -> str:
    """What a command that succeeds prints, its white space evened out."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("ipoib", ["off", pytest.param("none", marks=pytest.mark.slow)])
def test_two_vendors_meet_over_infiniband(tmp_path: Path, ipoib: str) -> None:
    file = discovered(tmp_path, ipoib=ipoib)
    cluster = load_cluster(file)
    assert [(n.kind, len(n.hosts)) for n in cluster.networks] == [("ethernet", 2), ("infiniband", 2)]
    assert [len(i.members) for i in cluster.islands] == [8, 8]
    ways = {w.kind: w for w in cluster.links[0].transports}
    assert {kind for kind, way in ways.items() if way.usable} == {"rdma", "direct", "tcp"}
    assert ways["rdma"].rate_bytes_per_s == 8 * 50e9
    assert ways["tcp"].rate_bytes_per_s == 25e9 / 8
    assert ways["tcp"].reason.endswith("(ethernet: no IP runs over their InfiniBand)")
    assert {nics for h in cluster.hosts for d in h.devices for nics in d.nics} == names_of(cluster)
    text = hetctl("plan", "--cluster", str(file), "--model", "llama-8b", "--set", "parallelism.pipeline=1")
    assert "bridge h200 - mi325x: rdma, 8 rails, 400.0 GB/s" in text
    assert "the best usable one: all reach ib0, from pinned host memory" in text
    assert "direct as well: not proved yet: ranks try it when they start" in text
    assert re.search(r"tcp as well \(3.1 GB/s\): all have addresses in \S+ \(ethernet: no IP runs over", text)


def names_of(cluster: Cluster) -> set[str]:
    """The names of the InfiniBand ports."""
    return {n.name for h in cluster.hosts for n in h.nics if n.kind == "infiniband"}


def test_roce_under_an_interface_that_is_down_is_down(tmp_path: Path) -> None:
    cluster = load_cluster(discovered(tmp_path, ipoib="off", fabric="roce"))
    assert [n.kind for n in cluster.networks] == ["ethernet"]
    assert [w.kind for w in cluster.links[0].transports if w.usable] == ["tcp"]


def test_rails_without_ip_are_measured_by_their_hosts_data_addresses(tmp_path: Path) -> None:
    a, b = load_cluster(discovered(tmp_path, ipoib="off")).hosts
    lanes = lanes_between(a, b)
    rdma = [lane for lane in lanes if not lane.carries_ip]
    assert [lane.devices for lane in rdma] == [(f"mlx5_{i}", f"mlx5_{i}") for i in range(8)]
    assert {lane.addresses for lane in lanes} == {(a.data_address, b.data_address)}
    assert [lane.nics for lane in lanes if lane.carries_ip] == [("eno1", "eno1")]


OFF = {"admin_up": False, "carrier": None}


def test_the_doctor_finds_them_well_and_says_that_no_ip_runs_there() -> None:
    found = state_of(every_nic(**OFF))
    assert (found.state, found.reason) == ("ok", "2 ports up; no IP runs over them, RDMA needs none")
    ill = all_of(every_nic(**OFF), every_nic(state="down", physical_state="polling"))
    assert state_of(ill).state == "fail"


def state_of(ill: Edit) -> Finding:
    """What rdma.port_state says of node0."""
    found = judge(checked(reports(node0=ill)), [BY_ID["rdma.port_state"]])
    return next(f for f in found if f.host == "node0")


def test_ports_under_a_bond_of_their_interfaces_stay_rdma_ports() -> None:
    def bonded(name: str, address: str, gpus: tuple[GpuFacts, ...]) -> Report:
        members = [replace(ib(f"ib{i}"), bond="bond0", admin_up=True) for i in range(2)]
        bond = replace(ethernet("bond0", address), link_layer="infiniband", virtual=False, bond_members=("ib0", "ib1"))
        return host(name, [*members, bond], gpus)

    built = build([bonded("a", "10.0.0.1", green()), bonded("b", "10.0.0.2", red())])
    assert [[n.name for n in h.nics] for h in built.cluster.hosts] == [["ib0", "ib1", "bond0"]] * 2
    assert [h.devices[0].nics for h in built.cluster.hosts] == [("ib0", "ib1")] * 2
    assert way(built, "h200", "mi325x", "rdma").rate_bytes_per_s == 100e9
    assert way(built, "h200", "mi325x", "tcp").reason == "all have addresses in 10.0.0.0/24"


def test_an_address_on_an_interface_that_is_off_is_none(tmp_path: Path) -> None:
    ill = every_nic(**OFF, addresses=(Address("10.9.0.1", 24, "global"),))
    [host, *_] = checked(reports(node0=ill)).cluster.hosts
    assert [n.address for n in host.nics if n.kind == "infiniband"] == [None, None]
    assert json.dumps(host.data_address) == '"192.168.0.1"'
