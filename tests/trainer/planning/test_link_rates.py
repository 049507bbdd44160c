"""Ports are shared by all that cross them, and what discovery measured is what plans count on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import (
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Measured,
    Member,
    Network,
    Nic,
    TransportOption,
    native_way,
)
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.plan import Plan
from hetctl.discovery.links import with_measured
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.link_rates import LinkRates, read_link_rates
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.pools import Pool, read_pools
from hetctl.trainer.planning.profile import BridgeProfile, Profile
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.recipe import load_recipe

GB = 1e9
STAGES = [("parallelism.pipeline", 2), ("parallelism.order", "given")]


def host(name: str, vendor: str, nics: dict[str, tuple[str, float]], *, kind: str, gpus: int = 8) -> Host:
    """`nics`: name -> (network, bytes per second); GPUs take them in turns."""
    ports = tuple(
        Nic(nic, kind, rate, network, f"10.0.0.{k}", f"mlx5_{k}" if kind == "roce" else None)  # type: ignore[arg-type]
        for k, (nic, (network, rate)) in enumerate(nics.items())
    )
    names = list(nics)
    row = {"nvidia": "h100", "amd": "mi300x"}[vendor]
    devices = tuple(Device(i, vendor, row, 80 * 2**30, (names[i % len(names)],)) for i in range(gpus))
    return Host(name, data_address="10.0.0.1", devices=devices, nics=ports)


def cluster(
    a: dict[str, tuple[str, float]],
    b: dict[str, tuple[str, float]],
    *,
    hosts: tuple[int, int] = (1, 1),
    vendors: tuple[str, str] = ("nvidia", "amd"),
    kind: str = "ethernet",
    way: str = "tcp",
    rate: float | None = None,
) -> Cluster:
    """Two islands of so many hosts with such ports, joined over one transport."""
    groups = [
        [host(f"{letter}{k}", vendor, nics, kind=kind) for k in range(count)]
        for letter, vendor, nics, count in zip("ab", vendors, (a, b), hosts, strict=True)
    ]
    islands = tuple(
        Island(name, vendor, "net0", tuple(Member(h.name, d.index) for h in group for d in h.devices))
        for name, vendor, group in zip(("a", "b"), vendors, groups, strict=True)
    )
    option = TransportOption(way, True, "as said", rate)  # type: ignore[arg-type]
    networks = tuple(Network(n, kind, ()) for n in dict.fromkeys(n for n, _ in (*a.values(), *b.values())))  # type: ignore[arg-type]
    link = IslandLink(("a", "b"), (option, native_way(*islands, option)))
    return Cluster((*groups[0], *groups[1]), islands, networks, (link,))


def links(of: Cluster, *measured: BridgeProfile, forced: str = "auto") -> tuple[LinkRates, tuple[Pool, ...]]:
    pools = read_pools(of)
    return read_link_rates(of, pools, forced=forced, measured=measured), pools


def seconds_of(of: Cluster, ranks: int, *measured: BridgeProfile, forced: str = "auto") -> float:
    """Of a gigabyte from so many ranks of `a` to as many of `b`."""
    found, (a, b) = links(of, *measured, forced=forced)
    return found.hop_seconds(PoolUse(a, 1, 1, ranks), PoolUse(b, 1, 1, ranks), GB)


def total_of(plan: Plan) -> float:
    [bridge] = plan.bridges
    return sum(rail.rate_bytes_per_s or 0.0 for rail in bridge.rails)


ONE = {"eth0": ("net0", 1.25 * GB)}
EIGHT = {f"eth{k}": ("net0", 25 * GB) for k in range(8)}


def test_eight_ranks_get_no_more_of_a_shared_port_than_one_does() -> None:
    assert seconds_of(cluster(ONE, ONE), 8) == pytest.approx(seconds_of(cluster(ONE, ONE), 1))


def test_a_measured_rate_per_rank_does_not_multiply_beyond_the_port() -> None:
    profile = BridgeProfile("tcp", 0.6 * GB, 0.5 * GB, 1e-4)
    one, eight = (seconds_of(cluster(ONE, ONE), ranks, profile) for ranks in (1, 8))
    assert one == pytest.approx(1 / 0.6, rel=0.05)
    assert eight >= 1 / 1.25


def test_the_native_way_shares_the_ports_that_tcp_does() -> None:
    pair = cluster(ONE, ONE, vendors=("nvidia", "nvidia"))
    assert seconds_of(pair, 8, forced="native") >= 1 / 1.25


def test_ranks_with_ports_of_their_own_add_up() -> None:
    assert seconds_of(cluster(EIGHT, EIGHT), 1) == pytest.approx(8 * seconds_of(cluster(EIGHT, EIGHT), 8), rel=0.01)


def test_a_stage_gets_the_ports_of_its_own_hosts_only() -> None:
    pair = cluster(ONE, ONE, hosts=(4, 4))
    assert seconds_of(pair, 8) == pytest.approx(4 * seconds_of(pair, 32), rel=0.01)


def test_gradients_of_ranks_behind_one_port_share_it() -> None:
    found, (a, b) = links(cluster(ONE, ONE, hosts=(2, 2)))
    assert found.sync_rate(a, b).per_host <= 1.25 * GB
    assert found.sync_rate(a, b).total <= 2.5 * GB


def test_the_ports_that_rails_take_share_a_network() -> None:
    """Two networks, wired the other way round on the second island."""
    a = {"r0": ("roce0", 25 * GB), "r1": ("roce1", 25 * GB)}
    b = {"r0": ("roce1", 25 * GB), "r1": ("roce0", 25 * GB)}
    pair = cluster(a, b, kind="roce", way="rdma")
    plan = make_plan(pair, load_recipe(None, STAGES))
    network = {(h.name, n.name): n.network for h in pair.hosts for n in h.nics}
    where = {r.rank: r.host for r in plan.ranks}
    for rail in plan.bridges[0].rails:
        ends = [(where[rail.from_rank], rail.from_nic), (where[rail.to_rank], rail.to_nic)]
        assert len({network[end] for end in ends}) == 1
    assert total_of(plan) == pytest.approx(50 * GB)


@pytest.mark.parametrize("hosts", [(2, 2), (1, 4)])
def test_discovery_and_plan_tell_the_same_rate(hosts: tuple[int, int]) -> None:
    """2.5 GB/s where 16 ranks share the ports of two hosts; one host of eight ports meets four of one."""
    a = ONE if hosts == (2, 2) else {f"eth{k}": ("net0", 1.25 * GB) for k in range(8)}
    pair = cluster(a, ONE, hosts=hosts, rate=min(hosts) * 1.25 * GB)
    rows = [Measured((f"a{k % hosts[0]}", f"b{k}"), ("eth0", "eth0"), "tcp", 5e-5, 1.2 * GB) for k in range(hosts[1])]
    known = with_measured(pair, rows)
    [tcp, _] = known.links[0].transports
    assert tcp.rate_bytes_per_s == pytest.approx(hosts[1] * 1.2 * GB)
    plan = make_plan(known, load_recipe(None, STAGES))
    used = {r.host for r in plan.ranks if r.replica is not None and r.host.startswith("b")}
    assert total_of(plan) == pytest.approx(len(used) * 1.2 * GB)


def test_no_step_is_shorter_than_what_its_ports_take() -> None:
    """Eight ranks behind a port of 1.25 GB/s: what a profile measured of one of them is not eight times there."""
    sets = [("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 512)]
    profile = Profile((), bridges=(BridgeProfile("tcp", 1.2 * GB, 1.2 * GB, 1e-4),))
    plan = make_plan(cluster(ONE, ONE), load_recipe(None, [*sets, *STAGES]), profile=profile)
    crossing = 512 * 4096 * 4096 * 2  # bytes of hidden states, and as many of their gradients the other way
    assert plan.predicted is not None
    assert crossing / (1.25 * GB) <= plan.predicted.step_time_s <= 1.5 * crossing / (1.2 * GB)


def test_unknown_rates_stay_unknown() -> None:
    pair = cluster(ONE, ONE)
    dark = tuple(replace(h, nics=tuple(replace(n, rate_bytes_per_s=None) for n in h.nics)) for h in pair.hosts)
    plan = make_plan(replace(pair, hosts=dark), load_recipe(None, STAGES))
    assert {rail.rate_bytes_per_s for rail in plan.bridges[0].rails} == {None}


def test_the_native_library_gets_its_share_of_a_port() -> None:
    cluster = describe_cluster(parse_spec("h200:2x8/ib400", CLASSES), CLASSES)
    pools = read_pools(cluster)
    assert pools[0].rates.nic_bytes_per_s == pytest.approx(0.92 * 50 * GB)
    inside = read_link_rates(cluster, pools).inside["h200"]
    assert inside.per_rank == pytest.approx(0.92 * 50 * GB)
    assert inside.per_host[0] == pytest.approx(0.92 * 400 * GB)
