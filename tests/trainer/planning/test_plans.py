"""Whole plans: valid, complete, saved and loaded; the shares of unequal replicas; drawings that need no network."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.comm.contract.plan import load_plan, save_plan
from hetctl.render.plan_page import plan_page
from hetctl.render.trace import chrome_trace
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.executable import check_executable
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan, weigh
from hetctl.trainer.planning.pools import read_pools
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.recipe import load_recipe

SPECS = ("h200:2,mi325x:2", "h200:3,mi325x:2", "a100:1,h100:1,mi300x:1", "a100:2+h100:2", "h200:4", "l4:1,l4:1@0.5")


@given(
    st.sampled_from(SPECS),
    st.booleans(),
    st.sampled_from((4, 6, 16)),
    st.sampled_from(("auto", 1, 2)),
    st.sampled_from(("auto", 1, 2, 4)),
    st.sampled_from(("auto", "uniform", "holmes")),
)
@settings(max_examples=60, deadline=None)
def test_every_plan_is_valid(spec: str, labelled: bool, samples: int, data: object, stages: object, split: str) -> None:
    """make_plan validates; here it is also complete, and the trainer can run it."""
    islands = parse_spec(spec, CLASSES)
    if labelled:
        machine = Machine("here", "gloo", (2 * 2**30,) * sum(i.count for i in islands), "cpu")
        cluster = label_machine(islands, machine)
    else:
        cluster = describe_cluster(islands, CLASSES)
    sets = [("batch.global_batch", samples), ("parallelism.data", data), ("parallelism.pipeline", stages)]
    recipe = load_recipe(None, [*sets, ("parallelism.split", split)])
    try:
        plan = make_plan(cluster, recipe)
    except Infeasible:
        return
    assert sum(r.samples for r in plan.replicas) == samples
    assert all(r.stages[0].layers[0] == 0 and r.stages[-1].layers[1] == 8 for r in plan.replicas)
    if data != "auto":
        assert len(plan.replicas) == data
    if stages != "auto":
        assert {len(r.stages) for r in plan.replicas} == {stages}
    if labelled:
        assert {r.island for r in plan.ranks if r.replica is not None} == {i.name for i in cluster.islands}
        check_executable(plan)
    for replica in plan.replicas:
        ahead = replica.forwards_ahead
        assert ahead is not None
        assert all(a >= b for a, b in pairwise(ahead))


@pytest.mark.parametrize(
    ("spec", "speeds"), [("h200:1,mi325x:1", {"h200": 70.0, "mi325x": 58.0}), ("h200:1@0.70,h200:1@0.58", {})]
)
def test_counts_follow_speeds_where_sizes_are_pinned(spec: str, speeds: dict[str, float]) -> None:
    cluster = describe_cluster(parse_spec(spec, CLASSES), CLASSES)
    sets = [("parallelism.data", 2), ("batch.global_batch", 128), ("batch.micro_batch_size", 1)]
    plan = make_plan(cluster, load_recipe(None, sets), speeds=speeds)
    assert [r.stages[0].micro_batches for r in plan.replicas] == [70, 58]


@pytest.mark.parametrize("samples", [48, 96, 192])
def test_sizes_follow_speeds_where_memory_allows(samples: int) -> None:
    cluster = describe_cluster(parse_spec("h200:1,h200:1@0.5", CLASSES), CLASSES)
    sets = [
        ("model.name", "llama-160m"),
        ("model.seq_len", 1024),
        ("parallelism.data", 2),
        ("batch.global_batch", samples),
    ]
    plan = make_plan(cluster, load_recipe(None, sets))
    first, second = (r.stages[0] for r in plan.replicas)
    assert first.micro_batches == second.micro_batches
    assert first.micro_batch_size == 2 * second.micro_batch_size


def test_two_classes_of_one_island_do_not_cross_a_bridge() -> None:
    plan = make_plan(describe_cluster(parse_spec("a100:4+h100:4", CLASSES), CLASSES), load_recipe(None))
    assert not plan.bridges
    assert {g.backend for g in plan.groups} <= {"nccl"}


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_plan(describe_cluster(parse_spec("h200:2,mi325x:2", CLASSES), CLASSES), load_recipe(None))
    save_plan(tmp_path / "plan.yaml", plan)
    assert load_plan(tmp_path / "plan.yaml") == plan


def test_trace_and_page_stand_alone() -> None:
    cluster = describe_cluster(parse_spec("h200:2,mi325x:2", CLASSES), CLASSES)
    recipe = load_recipe(None, [("model.name", "llama-8b"), ("batch.global_batch", 16), ("parallelism.pipeline", 2)])
    made = weigh(cluster, recipe)
    spans = made.predictions[0].simulated.spans
    trace = json.loads(json.dumps(chrome_trace(made.plan, spans)))
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(spans)
    last = max(e["ts"] + e["dur"] for e in complete)
    assert made.plan.predicted is not None
    assert last == pytest.approx(made.plan.predicted.step_time_s * 1e6, rel=1e-6)
    page = plan_page(made.plan, PredictedStep.of(made), explanation=("<b>not markup</b>",))
    assert not re.search(r"(src|href)=['\"]?http|url\(", page)
    assert "&lt;b&gt;not markup" in page


@pytest.mark.parametrize(("asked", "kind"), [("auto", "shm"), ("direct", "direct")])
def test_a_machines_own_devices_copy_to_each_other_only_where_that_is_asked_for(asked: str, kind: str) -> None:
    spec = parse_spec("h200:1,mi325x:1", CLASSES)
    cluster = label_machine(spec, Machine("here", "nccl", (1 << 30,) * 2))
    names = [island.name for island in cluster.islands]
    chosen = choose_transport(cluster.link(*names), *names, forced=asked)
    assert chosen.kind == kind
    assert kind == "shm" or "no RDMA" in chosen.reason


def test_processes_have_no_device_memory_to_copy() -> None:
    cluster = label_machine(parse_spec("cpu:1,cpu:1", CLASSES), Machine("here", "gloo", (1 << 30,) * 2))
    names = [island.name for island in cluster.islands]
    with pytest.raises(ConfigError, match="no device here"):
        choose_transport(cluster.link(*names), *names, forced="direct")


def test_cpus_beside_devices_are_priced_as_cpus_and_talk_by_gloo() -> None:
    machine = Machine("here", "nccl", (80 * 2**30,), "h100", host_memory_bytes=2**38)
    cluster = label_machine(parse_spec("cpu:2,h200:1", CLASSES), machine)
    cpus, device = read_pools(cluster)
    assert (cpus.rates.base, device.rates.base) == ("cpu", "h100")
    sets = [("model.name", "llama-160m"), ("batch.global_batch", 8), ("parallelism.data", 1)]
    recipe = load_recipe(None, [*sets, ("parallelism.pipeline", 2), ("train.precision", "fp32")])
    plan = make_plan(cluster, recipe)
    (replica,) = plan.replicas
    layers = {plan.ranks[s.ranks[0]].island: s.layers[1] - s.layers[0] for s in replica.stages}
    assert layers["h200"] > layers["cpu"] > 0
    kinds = {group.backend for group in plan.groups if set(group.ranks) == {0, 1}}
    assert kinds <= {"gloo"}
