"""Schedules beyond the closed form: planned when asked for, within memory, said to be faster where they would be."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.planning.executable import check_executable
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

MODEL = [("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 16), ("batch.micro_batch_size", 1)]


def planned(schedule: str, spec: str = "h200:1,mi325x:1", *more: tuple[str, object]) -> Plan:
    sets = [*MODEL, ("parallelism.schedule", schedule), ("parallelism.pipeline", 2), *more]
    return make_plan(describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, sets))


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_a_split_backward_is_faster_takes_memory_and_is_executable() -> None:
    plain, split = planned("1f1b"), planned("zero-bubble")
    check_executable(split)
    assert split.schedule == "zero-bubble"
    assert seconds(split) < seconds(plain)
    assert plain.predicted is not None
    assert split.predicted is not None
    assert split.predicted.memory_bytes[1] > plain.predicted.memory_bytes[1]
    assert any("put off" in reason for reason in split.reasons)


def test_interleaving_deals_stages_out_and_is_executable() -> None:
    plan = planned("interleaved")
    check_executable(plan)
    plan.validate(where="test", layers=32)
    devices = sorted(r.stages for r in plan.ranks)
    chunks = len(devices[0])
    assert chunks > 1
    assert devices == [tuple(range(0, 2 * chunks, 2)), tuple(range(1, 2 * chunks, 2))]
    assert len([g for g in plan.groups if g.kind == "pipeline"]) == 2 * chunks - 1
    assert seconds(plan) < seconds(planned("1f1b"))


def test_what_is_predicted_to_be_faster_is_chosen() -> None:
    chosen, asked = planned("auto"), [planned(name) for name in ("1f1b", "eager-1f1b", "zero-bubble", "interleaved")]
    assert seconds(chosen) <= min(map(seconds, asked)) * 1.001
    assert chosen.schedule in ("zero-bubble", "interleaved")


def test_compiled_blocks_and_guessed_costs_keep_the_backward_whole() -> None:
    assert planned("auto", "h200:1,mi325x:1", ("train.compile", True)).schedule != "zero-bubble"
    spec, memory = parse_spec("h200:1,mi325x:1", CLASSES), (2**40, 2**40)
    on_cpus = make_plan(label_machine(spec, Machine("here", "gloo", memory)), load_recipe(None, MODEL))
    assert on_cpus.schedule in ("1f1b", "eager-1f1b")


def test_layers_that_are_to_follow_speeds_are_not_interleaved() -> None:
    assert planned("auto", "h200:2").schedule == "interleaved"
    assert planned("auto", "h200:2", ("train.adapt", True)).schedule == "zero-bubble"


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="compiled blocks have one backward"):
        planned("zero-bubble", "h200:1,mi325x:1", ("train.compile", True))
    with pytest.raises(Infeasible, match="interleaved schedule"):
        planned("interleaved", "h200:1,mi325x:1", ("batch.global_batch", 15))
