"""Whether a plan lets sharded stages keep their weights whole, and counts the memory that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.costs import USABLE_SHARE
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.problem import layer_costs
from hetctl.trainer.planning.state_sharding import SPARE_BYTES, over_replicas
from hetctl.trainer.recipe import load_recipe


def planned(
    spec: str,
    sharded: str = "auto",
    samples: int = 4,
    precision: str = "auto",
    model: str = "llama-8b",
    **parallelism: int,
) -> Plan:
    sizes = [("model.name", model), ("model.seq_len", 2048), ("batch.global_batch", samples)]
    pinned = [("parallelism.pipeline", 1), ("parallelism.tensor", 1), ("train.sharded", sharded)]
    pinned += [("train.precision", precision)]
    pinned += [(f"parallelism.{name}", value) for name, value in parallelism.items()]
    return make_plan(describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, sizes + pinned))


@pytest.mark.parametrize(
    ("sharded", "whole"), [("auto", True), ("optimizer", True), ("replicas", True), ("all", False)]
)
def test_what_is_kept_whole_is_counted(sharded: str, whole: bool) -> None:
    plan, spare = planned("h200:2", sharded), planned("h200:2", "all")
    (stage,), (bare,) = plan.replicas[0].stages, spare.replicas[0].stages
    assert (stage.shards, stage.whole, bare.whole) == (2, whole, False)
    assert plan.predicted is not None
    assert spare.predicted is not None
    more = plan.predicted.memory_bytes[0] - spare.predicted.memory_bytes[0]
    parameters = 8.03e9
    assert more == pytest.approx(parameters * (2 + 4) / 2 if whole else 0, rel=1e-3)


@pytest.mark.parametrize(("spec", "holders"), [("h200:2,mi325x:2", 4), ("h200:2,mi325x:1", 3)])
def test_state_over_all_replicas_is_counted(spec: str, holders: int) -> None:
    inside, over = (planned(spec, sharded, samples=192, data=2) for sharded in ("optimizer", "replicas"))
    assert inside.predicted is not None
    assert over.predicted is not None
    assert over.predicted.step_time_s < inside.predicted.step_time_s  # a quarter less to exchange
    stages = [stage for replica in inside.replicas for stage in replica.stages]
    assert sum(stage.width for stage in stages) == holders
    cluster = describe_cluster(parse_spec(spec, CLASSES), CLASSES)
    costs = layer_costs(cluster, load_recipe(None, [("model.name", "llama-8b"), ("model.seq_len", 2048)]), None)
    held = over_replicas(inside.replicas, inside.predicted.memory_bytes, costs)
    for stage in stages:
        less = [inside.predicted.memory_bytes[r] - held[r] for r in stage.ranks]
        assert less == pytest.approx([8.03e9 * 12 * (1 / stage.shards - 1 / holders)] * stage.width, rel=1e-3)


@pytest.mark.parametrize(("gib", "over"), [(141, True), (70, False)])
def test_replicas_share_out_state_where_weights_stay_whole(gib: int, over: bool) -> None:
    plan = planned(f"h200:2~{gib}GiB,mi325x:2~{gib}GiB", samples=192, data=2)
    assert plan.over_replicas == over
    assert any("Replicas share out" in reason for reason in plan.reasons) == over
    assert all(stage.whole == over for replica in plan.replicas for stage in replica.stages)
    assert not planned("h200:2,mi325x:2", "optimizer", samples=192, data=2).over_replicas
    assert not planned("h200:2").over_replicas  # one replica


def test_replicas_without_memory_for_it_are_not_priced_as_sharing_state() -> None:
    auto, every = (planned("h200:2~70GiB,mi325x:2~70GiB", sharded, samples=8, data=2) for sharded in ("auto", "all"))
    assert auto.predicted is not None
    assert every.predicted is not None
    assert not auto.over_replicas
    # found under another price, so perhaps another of nearly equal plans
    assert auto.predicted.step_time_s == pytest.approx(every.predicted.step_time_s, rel=1e-3)


@pytest.mark.parametrize("sharded", ["optimizer", "replicas"])
def test_whole_weights_that_somebody_insists_on_are_planned_for(sharded: str) -> None:
    plan = planned("h100:4", sharded, samples=32)  # four wide, whole weights would need 97 GiB
    assert plan.predicted is not None
    assert plan.predicted.bridge_share == 0
    assert max(plan.predicted.memory_bytes) <= USABLE_SHARE * 80 * GiB
    assert all(s.whole for r in plan.replicas for s in r.stages if s.shards > 1)
    with pytest.raises(Infeasible, match=f"train.sharded={sharded}") as refused:
        planned("h200:2~40GiB,mi325x:2~40GiB", sharded, samples=192, data=2, pipeline=1)
    assert "leave out or change" in (refused.value.hint or "")


def test_a_plan_that_shares_out_state_of_weights_it_cuts_is_refused() -> None:
    plan = planned("h200:2~70GiB,mi325x:2~70GiB", samples=192, data=2)
    with pytest.raises(ConfigError, match="over_replicas needs whole weights, but a stage on ranks"):
        replace(plan, over_replicas=True).validate(where="plan.yaml")


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2 + 4), ("fp32", 4 + 4), ("fp64", 8 + 8)])
def test_whole_weights_take_their_precisions_bytes(precision: str, each: int) -> None:
    whole, cut = (planned("h200:2", s, precision=precision, model="llama-1b").predicted for s in ("optimizer", "all"))
    assert whole is not None
    assert cut is not None
    assert whole.memory_bytes[0] - cut.memory_bytes[0] == pytest.approx(1.236e9 * each / 2, rel=1e-3)


def test_whole_weights_never_take_the_last_memory() -> None:
    seen = set()
    for gib in range(88, 142, 6):
        plan = planned(f"h200:2~{gib}GiB")
        assert plan.predicted is not None
        for replica in plan.replicas:
            for stage in replica.stages:
                seen.add(stage.whole)
                room = gib * GiB - max(plan.predicted.memory_bytes[r] for r in stage.ranks)
                assert room >= (SPARE_BYTES if stage.whole else 0)
    assert seen >= {True, False}
