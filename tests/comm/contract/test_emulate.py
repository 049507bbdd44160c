"""A described cluster has the hosts, networks and links that its SPEC says, and what it cannot have is refused."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_fabric, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.link_rates import read_link_rates
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.pools import PORT_REACHED, read_pools
from hetctl.trainer.recipe import load_recipe


@pytest.mark.parametrize("word", ["80", "80B", "1024"])
def test_memory_of_which_the_unit_was_forgotten_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="bytes of memory, which no device has") as caught:
        parse_spec(f"h200:8~{word}", CLASSES)
    assert "GiB" in caught.value.hint
    assert parse_spec("h200:8~80GiB,mi325x:1~85899345920", CLASSES)


def described(spec: str, *links: str) -> Cluster:
    return describe_cluster(parse_spec(spec, CLASSES), CLASSES, links)


def rates(cluster: Cluster, a: str, b: str) -> tuple[str, float]:
    """The transport between two islands, and bytes per second of its ports together."""
    found = cluster.link(a, b)
    assert found is not None
    best = next(way for way in found.transports if way.usable)
    assert best.rate_bytes_per_s is not None
    return best.kind, best.rate_bytes_per_s


def test_a_spec_says_hosts_fabrics_and_what_joins_islands() -> None:
    cluster = described("h200:2x8/ib400,mi325x:4x4/roce200x2;25GbE")
    assert [len(h.devices) for h in cluster.hosts] == [8, 8, 4, 4, 4, 4]
    assert {(n.kind, len(n.hosts)) for n in cluster.networks} == {("infiniband", 2), ("roce", 4), ("ethernet", 6)}
    nvidia, amd = cluster.hosts[0], cluster.hosts[-1]
    assert [n.rate_bytes_per_s for n in nvidia.nics if n.kind == "infiniband"] == [50e9] * 8
    assert [n.rate_bytes_per_s for n in amd.nics if n.kind == "roce"] == [25e9] * 2
    assert rates(cluster, "h200", "mi325x") == ("tcp", 2 * 3.125e9)
    links = read_link_rates(cluster, read_pools(cluster))
    assert links.inside["h200"].per_host == pytest.approx((PORT_REACHED * 400e9,) * 2)
    assert links.inside["mi325x"].per_host == pytest.approx((PORT_REACHED * 50e9,) * 2)
    assert links.bridges[frozenset(("h200", "mi325x"))].total <= 2 * 3.125e9


def test_a_link_of_two_islands_is_theirs_alone() -> None:
    spec = "h200:8/roce200,mi325x:8/roce200,a100:8/roce200"
    assert rates(described(spec), "h200", "mi325x") == ("rdma", 200e9)
    assert parse_fabric("2.5GbE").bytes_per_s == 312.5e6
    cluster = described(f"{spec};roce100", "mi325x-h200=25GbE")
    assert rates(cluster, "h200", "mi325x") == ("tcp", 3.125e9)
    assert rates(cluster, "h200", "a100") == ("rdma", 100e9)
    links = read_link_rates(cluster, read_pools(cluster))
    assert links.bridges[frozenset(("h200", "mi325x"))].total <= 3.125e9
    assert links.bridges[frozenset(("h200", "a100"))].total <= 100e9


def test_islands_on_networks_of_libfabric_are_native_on_them_and_bridge_by_tcp() -> None:
    cluster = described("h200:2x8/efa400,mi325x:2x8/cxi200x4;25GbE")
    assert {n.kind for n in cluster.networks} == {"efa", "cxi", "ethernet"}
    assert rates(cluster, "h200", "mi325x") == ("tcp", 2 * 3.125e9)
    links = read_link_rates(cluster, read_pools(cluster))
    assert links.inside["h200"].per_host == pytest.approx((PORT_REACHED * 400e9,) * 2)
    assert links.inside["mi325x"].per_host == pytest.approx((PORT_REACHED * 100e9,) * 2)
    recipe = load_recipe(None, [("model.name", "llama-8b"), ("model.seq_len", 4096)])
    for spec, net in (("h200:2x8/efa400", "plugin"), ("h200:2x8/ib400", "ib"), ("h200:2x8/25GbE", "socket")):
        assert net in {g.net for g in make_plan(described(spec), recipe).groups}
    shared = described("h200:8/efa400,h100:8/efa400")
    ways = {way.kind: way for link in shared.links for way in link.transports}
    assert (ways["rdma"].usable, ways["tcp"].usable) == (False, True)
    assert "only libfabric reaches it" in ways["rdma"].reason


def test_what_is_not_said_is_as_ever() -> None:
    cluster = described("h200:12,mi325x:8")
    assert [n.name for n in cluster.networks] == ["roce0"]
    assert [len(h.devices) for h in cluster.hosts] == [8, 4, 8]
    assert rates(cluster, "h200", "mi325x") == ("rdma", 400e9)


def test_holmes_scene_of_two_fabrics_and_ethernet_can_be_typed() -> None:
    """Four nodes of RoCE and four of InfiniBand: only the pipeline crosses the Ethernet between (arXiv 2312.03549)."""
    cluster = described("a100:4x8/ib200x4,a100:4x8/roce200x4;25GbE")
    sets = [("model.name", "gpt-7.5b"), ("model.seq_len", 2048), ("batch.global_batch", 1536)]
    plan = make_plan(cluster, load_recipe(None, sets))
    assert len(plan.replicas) == 1
    assert {plan.ranks[r].island for r in plan.replicas[0].stages[0].ranks} != {
        plan.ranks[r].island for r in plan.replicas[0].stages[-1].ranks
    }


@pytest.mark.parametrize(
    ("spec", "links", "words"),
    [
        ("h200:8/ib400,mi325x:8/roce200", (), "nothing joins h200 and mi325x"),
        ("h200:8/foo", (), "'foo' is not a network"),
        ("h200:8,mi325x:8;fast", (), "'fast' is not a network"),
        ("h200:8/ib0,mi325x:8", (), "'ib0' is not a network"),
        ("h200:2x8+h100:2x4", (), "has hosts of 4 and of 8 GPUs"),
        ("h200:2x", (), "needs a count"),
        ("h200:8,mi325x:8", ("h200-a100=25GbE",), "is not A-B=NETWORK"),
        ("h200:8,mi325x:8", ("h200-mi325x",), "is not A-B=NETWORK"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, links: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        described(spec, *links)
