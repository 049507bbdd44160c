"""Precision changes speed and memory, is one for all ranks, and is refused where a device lacks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.own_hardware import own_classes, with_own
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.precision import precision_of, settled
from hetctl.trainer.planning.problem import layer_costs
from hetctl.trainer.planning.profile import ClassProfile, Point, Profile
from hetctl.trainer.recipe import load_recipe


def described(spec: str) -> Cluster:
    return describe_cluster(parse_spec(spec, CLASSES), CLASSES)


SIZES = [("model.name", "llama-1b"), ("model.seq_len", 2048), ("batch.global_batch", 32)]
PINS = [
    ("parallelism.pipeline", 2),
    ("parallelism.schedule", "1f1b"),
    ("parallelism.recompute", "none"),
    ("batch.micro_batch_size", 1),
]


def planned(spec: str, precision: str, *pins: tuple[str, object]) -> Plan:
    return make_plan(described(spec), load_recipe(None, [*SIZES, *PINS, *pins, ("train.precision", precision)]))


def test_wider_values_take_longer_and_more_memory() -> None:
    one = ("parallelism.data", 1)
    predicted = [planned("h200:2,a100:2", precision, one).predicted for precision in ("bf16", "fp32", "fp64")]
    steps = [p.step_time_s for p in predicted if p]
    held = [sum(p.memory_bytes) for p in predicted if p]
    assert steps[1] > 5 * steps[0]
    assert steps[2] >= steps[1]
    assert held[0] < held[1] < held[2]


def test_the_split_follows_the_precision() -> None:
    """In bf16 an H100 is three times an A100, in fp32 three and a half; an L40S falls from a third to more than it."""
    assert CLASSES["l40s"].sustained_in("bf16") < CLASSES["h100"].sustained_in("bf16") / 2
    assert CLASSES["l40s"].sustained_in("fp32") > CLASSES["a100"].sustained_in("fp32")
    assert CLASSES["rtx4090"].sustained_in("fp64") < CLASSES["a100"].sustained_in("fp64") / 10


def test_without_bf16_all_compute_in_fp16_and_it_is_said() -> None:
    plan = planned("v100:4,a100:4", "auto")
    assert any("All compute in fp16, since v100 cannot multiply bf16" in reason for reason in plan.reasons)
    for name in ("mi50", "mi60", "p100", "v100-pcie", "rtx2080ti"):
        plan = planned(f"{name}:4,rtx3090:4", "auto", ("parallelism.pipeline", 4))
        assert any(f"All compute in fp16, since {name} cannot" in reason for reason in plan.reasons)
    recipe = load_recipe(None)
    assert settled(recipe, described("v100:4,a100:4")).train.precision == "fp16"
    assert settled(recipe, described("h200:4,a100:4")) == recipe


def test_fp16_plans_are_those_of_bf16_where_there_is_both() -> None:
    halves = [planned("h200:2,a100:2", precision) for precision in ("bf16", "fp16")]
    assert halves[0].predicted == halves[1].predicted
    assert halves[0].replicas == halves[1].replicas
    assert CLASSES["v100"].sustained_in("fp16") == CLASSES["v100"].sustained_tflops


def test_an_mi100_trains_faster_in_fp16_than_in_bf16() -> None:
    steps = [planned("mi100:4", precision).predicted for precision in ("bf16", "fp16")]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[1].step_time_s < 0.7 * steps[0].step_time_s


def test_tf32_is_half_of_bf16_with_the_memory_of_fp32() -> None:
    """NVIDIA's data sheets, dense TFLOPS."""
    for name, tflops in (("a100", 156), ("h100", 494.5), ("a40", 74.85), ("l40s", 181), ("rtx4090", 82.6)):
        assert CLASSES[name].peak_in("tf32") == tflops
    assert CLASSES["a100"].peak_in("fp32") == 19.5  # unasked nothing is TF32
    pin = ("parallelism.layers", [8, 8])
    tf32, fp32 = (planned("h200:2,a100:2", precision, pin).predicted for precision in ("tf32", "fp32"))
    assert tf32 is not None
    assert fp32 is not None
    assert tf32.step_time_s < fp32.step_time_s / 2
    assert tf32.memory_bytes == fp32.memory_bytes


def test_what_a_device_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"bf16 is not possible: v100 and t4 cannot multiply bf16"):
        planned("v100:4,t4:4,a100:4", "bf16")
    with pytest.raises(ConfigError, match=r"tf32 is not possible: mi300x cannot multiply tf32") as refused:
        planned("a100:4,mi300x:4", "tf32")
    assert "torch does not take AMD's XF32" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"tf32 is not possible: cpu cannot"):
        planned("cpu:4", "tf32")


def test_a_person_says_what_a_class_has() -> None:
    [row] = own_classes(None, ["old=like:a100,bf16:false,tf32:false,fp32:15"])
    assert (row.bf16, row.tf32, row.fp32_tflops) == (False, False, 15)
    [bare] = own_classes(None, ["new=vendor:nvidia,tflops:160,memory:8GiB,bandwidth:1TB/s"])  # no peak is known
    assert [bare.sustained_in(p) for p in ("bf16", "fp16", "tf32", "fp32")] == [160, 160, 80, 10]  # type: ignore[arg-type]
    table = CLASSES.with_own([row])
    cluster = with_own(describe_cluster(parse_spec("old:2,h200:2", table), table), [row])
    assert precision_of(cluster, load_recipe(None)) == "fp16"
    with pytest.raises(ConfigError, match="old cannot multiply tf32"):
        precision_of(cluster, load_recipe(None, [("train.precision", "tf32")]))


def test_a_profile_holds_for_the_precision_it_was_measured_in() -> None:
    point = (Point(1, 0.01, 0.02),)
    usual = ClassProfile("h200", "llama-1b", 2048, point, point, point)
    profile = Profile((usual,)).with_class(replace(usual, precision="fp16", block=(Point(1, 0.04, 0.08),)))
    seen = {}
    for precision in ("bf16", "fp16", "fp32"):
        recipe = load_recipe(None, [*SIZES, ("train.precision", precision)])
        costs = layer_costs(described("h200:2"), recipe, profile)
        seen[precision] = [c.block[0].forward_s for c in costs.profiles]
    assert seen == {"bf16": [0.01], "fp16": [0.04], "fp32": []}
    plan = make_plan(described("h200:2"), load_recipe(None, [*SIZES, ("train.precision", "fp32")]), profile=profile)
    assert any("says nothing of h200 for 'llama-1b' at 2048 tokens in fp32" in reason for reason in plan.reasons)


def test_a_loss_scale_without_fp16_is_refused() -> None:
    for precision, found in (("bf16", "bf16"), ("auto", "bf16"), ("fp64", "fp64")):
        recipe = load_recipe(None, [("train.precision", precision), ("train.loss_scale", 1024)])
        with pytest.raises(ConfigError, match=f"loss_scale is fp16's, and this would compute in {found}"):
            precision_of(described("h200:2"), recipe)


def test_labels_of_an_emulation_lack_nothing() -> None:
    """What computes is this machine's devices, whatever they are called."""
    spec = parse_spec("v100:1,mi325x:1", CLASSES)
    for native, kind, expected in (("gloo", "cpu", "fp32"), ("nccl", "h100", "bf16")):
        machine = Machine("here", native, (2**34, 2**34), kind)  # type: ignore[arg-type]
        recipe = load_recipe(None)
        assert precision_of(label_machine(spec, machine), recipe) == expected
        assert settled(recipe, label_machine(spec, machine)) == recipe
