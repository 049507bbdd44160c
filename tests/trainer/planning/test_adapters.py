"""What the planner counts where adapters are trained and the model's own weights are frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.trainer.model.adapters import is_trained
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.model.tensor_parallel import TensorShare
from hetctl.trainer.planning.costs import LayerCosts, Mode
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.predicted_step import memory_parts
from hetctl.trainer.recipe import BatchSection, LoraSection, ModelSection, ParallelismSection, Recipe

MODELS = ["llama-8b", "qwen3-4b", "gemma2-9b", "opt-1.3b", "smollm3-3b"]


def asked(model: str, lora: LoraSection, **pins: Any) -> Recipe:
    pinned = ParallelismSection(**pins)
    return Recipe(model=ModelSection(model, 2048), batch=BatchSection(64), lora=lora, parallelism=pinned)


def weighed(lora: LoraSection, where: str = "h100:2,mi300x:2", **pins: Any) -> Planning:
    return weigh(describe_cluster(parse_spec(where, CLASSES), CLASSES), asked("llama-8b", lora, **pins))


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("down_proj", "k_proj")])
def test_counts_are_those_of_the_built_model(model: str, targets: Any, tensor: int) -> None:
    shape = asked(model, LoraSection(8, targets=targets)).shape()
    with torch.device("meta"):
        block = StageModel(shape, (1, 2), tensor=TensorShare(tensor, 0)).named()
    costs = LayerCosts(shape, 2048)
    sizes = {name: parameter.numel() for name, parameter in block.items()}
    trained = {name: size for name, size in sizes.items() if is_trained(name, shape.adapters)}
    assert costs.trained_on(tensor) == sum(trained.values()) > 0
    assert costs.frozen_on(tensor) == sum(sizes.values()) - sum(trained.values())


def test_memory_is_weights_to_compute_with_and_the_adapters_state() -> None:
    made = weighed(LoraSection(16), pipeline=1, data=2, tensor=1, recompute="none", optimizer_state="device")
    (parts, *_), shape = memory_parts(made.plan, made.problem.costs), SHAPES["llama-8b"]
    assert parts is not None
    adapters = 41_943_040  # PEFT's count of them
    assert parts["weights"] == 2 * (shape.parameters + adapters)
    assert parts["gradients"] == 4 * adapters
    assert parts["optimiser"] <= 12 * adapters


def test_sums_and_updates_are_of_adapters_alone() -> None:
    every, adapters = (LayerCosts(asked("llama-8b", LoraSection(rank)).shape(), 2048) for rank in (None, 16))
    assert adapters.trained_on(1) / every.trained_on(1) == pytest.approx(41_943_040 / 32 / every.block_parameters)
    assert weighed(LoraSection(16), pipeline=1).plan.predicted is not None


@pytest.mark.parametrize(
    ("rank", "targets", "fewer"), [(64, "all-linear", False), (1, ("q_proj",), True), (1, ("down_proj",), True)]
)
def test_inputs_that_no_weight_gradient_asks_for_are_not_kept(rank: int, targets: Any, fewer: bool) -> None:
    whole, adapters = (
        LayerCosts(asked("llama-8b", s).shape(), 512) for s in (LoraSection(), LoraSection(rank, targets=targets))
    )
    assert (adapters.activation_bytes(1) < whole.activation_bytes(1)) is fewer
    full = Mode("full")
    assert adapters.activation_bytes(1, mode=full) == whole.activation_bytes(1, mode=full)


def test_backward_without_weight_gradients_is_faster_and_so_is_the_plan() -> None:
    whole, adapters = weighed(LoraSection()), weighed(LoraSection(16))
    rates = whole.problem.pools[0].rates
    before, after = (p.problem.costs.block(rates, 4.0) for p in (whole, adapters))
    assert before.forward < after.forward < 1.3 * before.forward
    assert 0.5 * before.backward < after.backward < 0.8 * before.backward
    assert after.backward > after.forward
    first, then = (p.plan.predicted for p in (whole, adapters))
    assert first is not None
    assert then is not None
    assert then.step_time_s < 0.9 * first.step_time_s
    assert any("41,943,040" in reason for reason in adapters.plan.reasons)


def test_flops_of_a_token_leave_out_what_is_not_made() -> None:
    whole = SHAPES["llama-8b"]
    adapted = asked("llama-8b", LoraSection(16)).shape()
    products = whole.layers * (whole.attention_parameters + whole.mlp_parameters) + whole.vocab * whole.hidden
    assert whole.token_flops(2048) - adapted.token_flops(2048) == 2.0 * products
    assert replace(adapted, adapters=None) == whole
