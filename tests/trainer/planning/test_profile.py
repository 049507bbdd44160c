"""profile.yaml: between, before and beyond its points; what it must refuse; what a plan makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetctl.bench.bridge import native_sums_of, profiles_of
from hetctl.bench.ops import add_to_profile
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.model.config import find_shape
from hetctl.trainer.planning.costs import LayerCosts, Mode, Seconds, ValueBytes, seconds_of
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.pools import Rates
from hetctl.trainer.planning.profile import (
    BridgeProfile,
    ClassProfile,
    Launches,
    OffloadedUpdate,
    Point,
    Profile,
    SumPoint,
    load_profile,
    save_profile,
)
from hetctl.trainer.recipe import load_recipe

RATES = Rates(1e12, 1e12, 1e12, 1e12, 1e12, 1e-6, 1 << 30, 0)


def layer_costs(profile: Profile, *, eager: bool = False) -> LayerCosts:
    shape, selective_s = find_shape("demo"), 1e-12 if eager else 0.0
    known = profile.matching(shape, 128)
    return LayerCosts(shape, 128, ValueBytes(), known, profile.native_sums, selective_s=selective_s)


def entry(name: str, *, block: float = 1.0, seq_len: int = 128) -> ClassProfile:
    points = (Point(1, block, 2 * block), Point(4, 2.5 * block, 5 * block))
    return ClassProfile(name, "demo", seq_len, points, (Point(1, 0.001, 0.001),), (Point(1, 0.01, 0.02),))


def test_times_are_linear_between_points_and_beyond_them() -> None:
    cpu = entry("cpu")
    assert cpu.at("block", 1) == (1.0, 2.0)
    assert cpu.at("block", 2) == pytest.approx((1.5, 3.0))
    assert cpu.at("block", 8) == pytest.approx((4.5, 9.0))
    assert cpu.at("embedding", 3) == pytest.approx((0.003, 0.003))


def test_files_come_back_and_newer_measurements_replace_older(tmp_path: Path) -> None:
    profile = Profile((entry("cpu"),)).with_class(entry("h200")).with_class(entry("cpu", block=3.0))
    save_profile(tmp_path / "p.yaml", profile)
    again = load_profile(tmp_path / "p.yaml")
    assert {c.device_class: c.block[0].forward_s for c in again.classes} == {"h200": 1.0, "cpu": 3.0}


def test_speeds_and_tensor_degrees_are_entries_of_their_own(tmp_path: Path) -> None:
    slow = replace(entry("h200", block=1.5), speed=0.6)
    part = replace(entry("h200", block=0.7), tensor=2)
    profile = Profile((entry("h200"),)).with_class(slow).with_class(part).with_class(replace(slow, speed=0.5))
    save_profile(tmp_path / "p.yaml", profile)
    costs = layer_costs(load_profile(tmp_path / "p.yaml"))
    rates = replace(RATES, base="h200")
    assert costs.block(rates, 1) == Seconds(1.0, 2.0)
    assert costs.block(replace(rates, speed=0.6), 1) == Seconds(1.5, 3.0)  # its own, not 1.0 / 0.6
    assert costs.block(replace(rates, speed=0.8), 1).forward == pytest.approx(1.25)
    assert costs.block(replace(rates, speed=0.55), 1).forward == pytest.approx(1.5 * 0.6 / 0.55, rel=0.1)
    assert costs.block(rates, 1, tensor=2).forward > 0.7  # its own, and the sums
    assert costs.block(rates, 1, tensor=2).forward < 0.71
    assert costs.block(rates, 1, tensor=4).forward == pytest.approx(0.35, rel=0.01)  # half of what half takes
    assert costs.embedding(rates, 1, tensor=2).forward > 0.001  # all of it, and a sum
    assert costs.measured(replace(rates, base="mi325x")) is None


def test_sums_of_a_tensor_group_take_what_was_measured() -> None:
    points = (SumPoint(1 << 10, 50e-6), SumPoint(1 << 20, 80e-6), SumPoint(1 << 24, 400e-6))
    profile = Profile((replace(entry("h200"), tensor=2),), native_sums=points)
    costs = layer_costs(profile)
    rates = replace(RATES, base="h200")
    nbytes = costs.boundary_bytes(1)
    assert 1 << 10 < nbytes < 1 << 20
    once = 50e-6 + (nbytes - (1 << 10)) / ((1 << 20) - (1 << 10)) * 30e-6
    assert costs.block(rates, 1, tensor=2).forward - 1.0 == pytest.approx(2 * once)  # after attention and MLP
    assert seconds_of(points, 1 << 25) == pytest.approx(800e-6)
    assert seconds_of(points, 1) == 50e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"speed": 0.0}, "a speed above zero"), ({"tensor": 0}, "a tensor degree of at least one")],
)
def test_impossible_speeds_and_degrees_are_refused(tmp_path: Path, changes: dict[str, float], said: str) -> None:
    save_profile(tmp_path / "p.yaml", Profile((replace(entry("cpu"), **changes),)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        load_profile(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("points", "said"),
    [((SumPoint(8, 1.0), SumPoint(8, 2.0)), "ascending bytes"), ((SumPoint(0, 1.0),), "above zero")],
)
def test_impossible_sums_are_refused(tmp_path: Path, points: tuple[SumPoint, ...], said: str) -> None:
    save_profile(tmp_path / "p.yaml", Profile((entry("cpu"),), native_sums=points))
    with pytest.raises(ConfigError, match=said):
        load_profile(tmp_path / "p.yaml")


def test_native_sums_come_from_two_devices_of_a_host(tmp_path: Path) -> None:
    found = {"islands": [1, 1], "hosts": 1, "ways": {"native": {"all_reduce_s": {"8192": 3e-5, "1024": 2e-5}}}}
    assert native_sums_of(found) == (SumPoint(1024, 2e-5), SumPoint(8192, 3e-5))
    assert native_sums_of(found | {"hosts": 2}) == native_sums_of(found | {"islands": [2, 2]}) == ()
    assert native_sums_of(found | {"ways": {}}) == ()
    add_to_profile(tmp_path / "p.yaml", native_sums=native_sums_of(found))
    add_to_profile(tmp_path / "p.yaml", entry("cpu"))
    assert load_profile(tmp_path / "p.yaml") == Profile((entry("cpu"),), native_sums=native_sums_of(found))


def test_descending_points_are_refused(tmp_path: Path) -> None:
    bad = ClassProfile("cpu", "demo", 128, (Point(4, 1, 1), Point(1, 1, 1)), (Point(1, 1, 1),), (Point(1, 1, 1),))
    save_profile(tmp_path / "p.yaml", Profile((bad,)))
    with pytest.raises(ConfigError, match="ascending points of block"):
        load_profile(tmp_path / "p.yaml")


def test_measured_classes_decide_the_split_and_missing_ones_are_named() -> None:
    cluster = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    sets = [("parallelism.pipeline", 2), ("parallelism.order", "given"), ("batch.micro_batch_size", 1)]
    recipe = load_recipe(None, sets)
    both = Profile((entry("h200", block=1.0), entry("mi325x", block=3.0)))
    plan = make_plan(cluster, recipe, profile=both)
    assert plan.predicted is not None
    assert plan.predicted.basis == "measured"
    assert [s.layers for s in plan.replicas[0].stages] == [(0, 6), (6, 8)]
    partly = make_plan(cluster, recipe, profile=Profile((entry("h200"),)))
    assert partly.predicted is not None
    assert partly.predicted.basis == "table"
    assert any("says nothing of mi325x" in reason for reason in partly.reasons)


def joined(cluster: Cluster, *bridges: BridgeProfile, forced: str = "auto") -> Plan:
    """A plan of two stages in which every pair of islands talks."""
    recipe = load_recipe(None, [("parallelism.pipeline", len(cluster.islands)), ("bridge.transport", forced)])
    return make_plan(cluster, recipe, profile=Profile((entry("h200"),), bridges=bridges))


@pytest.mark.parametrize(("sums", "kind", "backend"), [(2e9, "rdma", "het"), (4e9, "native", "nccl")])
def test_islands_of_one_vendor_take_the_faster_of_bridge_and_sockets(sums: float, kind: str, backend: str) -> None:
    cluster = describe_cluster(parse_spec("h200:1,h100:1", CLASSES), CLASSES)
    measured = (BridgeProfile("rdma", 9e9, 3e9, 1e-5), BridgeProfile("native", 1e9, sums, 1e-5))
    plan = joined(cluster, *measured)
    [bridge] = plan.bridges
    assert bridge.transport == kind
    assert "sums measured at" in bridge.reason
    crossing = [g for g in plan.groups if g.kind == "pipeline"]
    assert {(g.backend, g.net) for g in crossing} == {(backend, "socket" if kind == "native" else None)}
    assert plan.crosses_islands(crossing[0].ranks) == (kind == "rdma")
    plan.validate(where="test")
    assert joined(cluster, measured[1]).bridges[0].transport == "rdma"  # nothing to compare it with


def test_the_native_way_can_be_forced_within_a_vendor_only() -> None:
    plan = joined(describe_cluster(parse_spec("h200:1,h100:1", CLASSES), CLASSES), forced="native")
    assert (plan.bridges[0].transport, plan.bridges[0].forced) == ("native", True)
    with pytest.raises(ConfigError, match="cannot be native: no library speaks nvidia and amd"):
        joined(describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES), forced="native")


def test_a_plan_that_joins_two_vendors_natively_is_refused() -> None:
    plan = joined(describe_cluster(parse_spec("h200:1,h100:1", CLASSES), CLASSES), forced="native")
    islands = (plan.islands[0], replace(plan.islands[1], vendor="amd"))
    with pytest.raises(ConfigError, match="no native library joins h200 and h100: they are of two vendors"):
        replace(plan, islands=islands).validate(where="plan.yaml")


def test_the_native_way_is_a_transport_only_where_it_was_measured_as_one() -> None:
    way = {"message_bytes_per_s": {"1024": 1.0, "8192": 2e9}, "sums_bytes_per_s": 3e9, "latency_s": {"p50": 1e-5}}
    ways: dict[str, Any] = dict.fromkeys(("native", "tcp", "rdma"), way) | {"direct": way | {"label": "peer copy"}}
    found = {"transports": ["native", "tcp", "rdma", "direct"], "ways": ways}
    assert [b.transport for b in profiles_of(found)] == ["native", "tcp", "rdma"]
    assert profiles_of(found)[0] == BridgeProfile("native", 2e9, 3e9, 1e-5)
    assert [b.transport for b in profiles_of(found | {"transports": ["tcp", "direct"]})] == ["tcp"]  # a yardstick


def test_fewer_samples_never_take_longer_than_more() -> None:
    odd = replace(entry("h200"), block=(Point(1, 3.0, 2.0), Point(2, 2.0, 5.0), Point(4, 4.0, 8.0)))
    assert odd.at("block", 1) == (2.0, 2.0)
    assert odd.at("block", 2) == (2.0, 5.0)
    assert odd.at("block", 3) == (3.0, 6.5)


def test_a_profile_of_a_whole_tensor_group_has_its_sums_in_it() -> None:
    rates = replace(RATES, base="h200", native_bytes_per_s=1.0)
    alone, whole = (replace(entry("h200"), tensor=2, sums=sums) for sums in (False, True))
    costs = [layer_costs(Profile((one,))) for one in (alone, whole)]
    slow, exact = (c.block(rates, 1, tensor=2) for c in costs)
    assert exact == Seconds(*whole.at("block", 1))
    assert slow.forward > 1000 * exact.forward
    assert costs[1].embedding(rates, 1, tensor=2) == Seconds(*whole.at("embedding", 1))


def test_an_offloaded_update_is_its_own_copies_and_a_share_of_the_host() -> None:
    measured = replace(entry("h200"), update_s=1e-10, offloaded=OffloadedUpdate(copies_s=1e-9, alone_s=2e-9))
    rates = replace(RATES, base="h200")
    costs, silent = layer_costs(Profile((measured,))), layer_costs(Profile((replace(measured, offloaded=None),)))
    assert costs.update(rates, 1e6) == pytest.approx(1e-4)
    assert costs.update(rates, 1e6, offload=True) == pytest.approx(3e-3)
    assert costs.update(replace(rates, host_devices=8), 1e6, offload=True) == pytest.approx(17e-3)
    by_table = 2 * sum((ValueBytes().weights, ValueBytes().gradients, ValueBytes().optimizer)) / RATES.host_bytes_per_s
    assert silent.update(rates, 1e6, offload=True) == pytest.approx(1e6 * by_table), "an older file says nothing of it"


def test_what_a_host_takes_to_launch_bounds_what_is_computed_again() -> None:
    """Each pass for itself; blocks that compute nothing again were timed with their launches."""
    rates = replace(RATES, base="h200")
    plain = layer_costs(Profile((entry("h200"),)), eager=True).block(rates, 1)
    slow = Launches(selective=Point(1, 3.0, 7.0), full=Point(1, 2.0, 8.0))
    quick = Launches(Point(1, 1e-9, 1e-9), Point(1, 1e-9, 1e-9))
    bound, free = (Profile((replace(entry("h200"), launches=one),)) for one in (slow, quick))
    for mode, least in ((Mode("selective"), Seconds(3.0, 7.0)), (Mode("full"), Seconds(2.0, 8.0))):
        assert layer_costs(bound, eager=True).block(rates, 1, mode=mode) == least
        assert layer_costs(free, eager=True).block(rates, 1, mode=mode).both < 2 * plain.both
        assert layer_costs(bound).block(rates, 1, mode=mode).both < least.both, "compiled blocks launch less"
        slower = layer_costs(bound, eager=True).block(replace(rates, speed=0.1), 1, mode=mode)
        assert slower.both > least.both
    assert layer_costs(bound, eager=True).block(rates, 1) == plain


def test_fewer_samples_than_were_measured_take_no_less_than_their_share() -> None:
    """By the slope alone one sample would take no time at all."""
    steep = replace(entry("h200"), block=(Point(3, 1.0, 2.0), Point(4, 2.5, 5.0)))
    assert steep.at("block", 1) == pytest.approx((1 / 3, 2 / 3))
    assert steep.at("block", 5) == pytest.approx((4.0, 8.0))
