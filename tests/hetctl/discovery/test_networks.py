"""Networks that only libfabric reaches: AWS EFA and HPE Slingshot, from what a host shows to how its islands talk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.fabrics import NETWORKS, PLUGIN_KINDS, RDMA_KINDS, kind_of_port
from hetctl.comm.contract.facts import Address, HostFacts, Library, NicFacts, RdmaFacts
from hetctl.discovery.fabric import NotedCluster, Report, build
from hetctl.discovery.networks import ports_of
from hetctl.probe.nics import nics
from hetctl.probe.notes import Notes
from hetctl.probe.raw import load
from tests.hetctl.discovery.test_fabric import GB, green, python_with, red, roce, said, shape, way

FACTS = Path(__file__).resolve().parents[2] / "facts" / "rdma"
PLUGIN = RdmaFacts(libraries=(Library("libibverbs.so.1"), Library("libnccl-net-ofi.so"), Library("librccl-net.so")))
BARE = RdmaFacts(libraries=(Library("libibverbs.so.1"), Library("libnccl.so.2")))


def recorded(case: str, ip: str) -> tuple[NicFacts, ...]:
    """A recorded host's ports, its one interface with an address."""
    found = nics(load((FACTS / case / "raw.json").read_bytes()), Notes())
    return tuple(replace(n, addresses=(Address(ip, 20, "global"),)) if n.netdev else n for n in found)


def amazon(number: int, *, vendor: str = "green", rdma: RdmaFacts = PLUGIN, **more: object) -> Report:
    gpus = green(2) if vendor == "green" else red(2)
    facts = HostFacts(gpus=gpus, nics=recorded("efa-beside-ena", f"172.31.0.{number}"), rdma=rdma)
    return Report(f"p5-{number}", Access(**more), replace(facts, interpreters=python_with("nixl")))  # type: ignore[arg-type]


def cray(number: int, *, vendor: str = "red", rdma: RdmaFacts = PLUGIN) -> Report:
    gpus = green(2) if vendor == "green" else red(2)
    nics = recorded("slingshot-one-interface-hidden", f"10.100.0.{number}")
    return Report(f"nid{number}", Access(), HostFacts(gpus=gpus, nics=nics, rdma=rdma))


def rates(found: NotedCluster, host: str) -> dict[str, tuple[str, float | None]]:
    return {n.name: (n.kind, n.rate_bytes_per_s) for n in found.cluster.host_by_name[host].nics}


def test_efa_is_a_fabric_of_its_own_with_the_devices_rates() -> None:
    found = build([amazon(1), amazon(2)])
    assert shape(found.cluster) == {"h200": ("nvidia", "efa", ["p5-1", "p5-2"])}
    assert rates(found, "p5-1") == {
        "rdmap79s0/1": ("efa", 12.5 * GB),
        "rdmap80s0/1": ("efa", 25 * GB),
        "ens32": ("ethernet", None),
    }
    assert [n.reason for n in found.cluster.networks if n.kind == "efa"] == [
        "AWS EFA, IP network 172.31.0.0/20 of ens32"
    ]
    assert {n.rdma_device for n in found.cluster.host_by_name["p5-1"].nics} == {None}  # no verbs that engines can use
    assert [d.nics for d in found.cluster.host_by_name["p5-1"].devices] == [("rdmap79s0/1",), ("rdmap80s0/1",)]
    assert said(found) == ""


@pytest.mark.parametrize(
    ("rdma", "words"),
    [
        (BARE, "nccl's plugin for it (libnccl-net*.so) is not on the library path"),
        (RdmaFacts(), "whether its plugin is installed is unknown: ldconfig gave no answer"),
    ],
)
def test_without_its_plugin_on_every_host_the_island_takes_tcp_and_it_is_said(rdma: RdmaFacts, words: str) -> None:
    found = build([amazon(1), amazon(2, rdma=rdma)])
    assert shape(found.cluster) == {"h200": ("nvidia", "ethernet", ["p5-1", "p5-2"])}
    assert (
        said(found)
        == f"p5-2: it has AWS EFA (efa0), but {words}: between hosts its island takes TCP over its ENA interface"
    )


def test_a_person_may_say_where_the_plugin_is() -> None:
    found = build([amazon(1, rdma=BARE, env={"NCCL_NET_PLUGIN": "/opt/ofi/libnccl-net.so"}), amazon(2)])
    assert shape(found.cluster)["h200"][1] == "efa"


def test_two_vendors_over_efa_bridge_by_tcp_and_hear_why_not_by_rdma() -> None:
    found = build([amazon(1), amazon(2, vendor="red")])
    assert {name: island[1] for name, island in shape(found.cluster).items()} == {"h200": "host", "mi325x": "host"}
    rdma, direct = (way(found, "h200", "mi325x", kind) for kind in ("rdma", "direct"))
    assert (rdma.usable, direct.usable) == (False, False)
    assert rdma.reason.startswith("p5-1 has AWS EFA: only libfabric reaches it, which the engines here do not use")
    assert way(found, "h200", "mi325x", "tcp").reason == "all have addresses in 172.31.0.0/20"


def test_slingshot_is_no_ethernet_and_its_interfaces_carry_tcp() -> None:
    found = build([cray(1), cray(2), cray(3, vendor="green")])
    assert {name: island[1:] for name, island in shape(found.cluster).items()} == {
        "mi325x": ("cxi", ["nid1", "nid2"]),
        "h200": ("host", ["nid3"]),
    }
    assert rates(found, "nid1") == {"hsn0": ("cxi", 25 * GB), "cxi1": ("cxi", 25 * GB)}
    tcp = way(found, "mi325x", "h200", "tcp")
    assert (tcp.usable, tcp.rate_bytes_per_s) == (True, 25 * GB)  # what has an address
    assert "HPE Slingshot" in way(found, "mi325x", "h200", "rdma").reason


def test_a_hidden_slingshot_interface_is_on_the_network_of_the_visible_one() -> None:
    management = NicFacts(
        "eno1", netdev="eno1", link_layer="ethernet", state="up", addresses=(Address("10.1.0.1", 24),)
    )
    nics = (management, *reversed(recorded("slingshot-one-interface-hidden", "10.100.0.1")))
    ports, _ = ports_of("nid1", HostFacts(nics=nics))
    assert {p.facts.name: p.key for p in ports} == {
        "eno1": "10.1.0.0/24",
        "cxi1": "10.100.0.0/20",
        "hsn0": "10.100.0.0/20",
    }


def test_roce_interfaces_of_slingshot_10_stay_roce() -> None:
    nic = replace(roce("hsn0", "10.0.0.1"), driver="mlx5_core", pci_id="15b3:1019")
    (port,), _ = ports_of("nid1", HostFacts(nics=(nic,)))
    assert port.kind == "roce"


def test_a_host_without_any_address_has_no_known_network() -> None:
    bare = HostFacts(nics=nics(load((FACTS / "efa-beside-ena" / "raw.json").read_bytes()), Notes()))
    ports, ignored = ports_of("p5", bare)
    assert ports == []
    assert "AWS EFA, whose members no IP network of this host tells" in {i.reason for i in ignored}


def test_the_table_of_networks() -> None:
    assert RDMA_KINDS == ("infiniband", "roce")
    assert PLUGIN_KINDS == ("cxi", "efa")
    assert all(row.ip and "{host}" in row.install for row in NETWORKS.values() if row.plugin)
    assert kind_of_port("mlx5_core", "15b3:1021") is kind_of_port(None, None) is None
    assert kind_of_port(None, "1590:0371") == "cxi"
    assert kind_of_port("vfio-pci", "1d0f:ec20") is None  # the cloud's plain adapter
