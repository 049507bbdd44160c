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
from hetctl.trainer.planning.costs import MADE_WHOLE_BYTES, MASK_BYTES, SELECTIVE_S, LayerCosts, Mode
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.predicted_step import memory_parts
from hetctl.trainer.recipe import BatchSection, LoraSection, ModelSection, ParallelismSection, Recipe, TrainSection

MODELS = ["llama-8b", "qwen3-4b", "gemma2-9b", "opt-1.3b", "smollm3-3b"]


def asked(model: str, lora: LoraSection, **pins: Any) -> Recipe:
    pinned = ParallelismSection(**pins)
    return Recipe(model=ModelSection(model, 2048), batch=BatchSection(64), lora=lora, parallelism=pinned)


def weighed(lora: LoraSection, where: str = "h100:2,mi300x:2", **pins: Any) -> Planning:
    return weigh(describe_cluster(parse_spec(where, CLASSES), CLASSES), asked("llama-8b", lora, **pins))


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("down_proj", "k_proj")])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_counts_are_those_of_the_built_model(model: str, targets: Any, dora: bool, tensor: int) -> None:
    shape = asked(model, LoraSection(8, targets=targets, dora=dora)).shape()
    with torch.device("meta"):
        block = StageModel(shape, (1, 2), tensor=TensorShare(tensor, 0)).named()
    costs = LayerCosts(shape, 2048)
    sizes = {name: parameter.numel() for name, parameter in block.items()}
    trained = {name: size for name, size in sizes.items() if is_trained(name, shape.adapters)}
    assert costs.trained_on(tensor) == sum(trained.values()) > 0
    assert costs.frozen_bytes_on(tensor) == 2 * (sum(sizes.values()) - sum(trained.values()))


@pytest.mark.parametrize("tensor", [1, 4, 8])
@pytest.mark.parametrize("model", ["llama-8b", "qwen3-4b", "opt-1.3b"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_bytes_of_quantised_weights_are_those_of_the_built_model(model: str, kind: Any, tensor: int) -> None:
    shape = asked(model, LoraSection(8, targets=("q_proj",), quantize=kind)).shape()
    with torch.device("meta"):
        block = StageModel(shape, (1, 2), tensor=TensorShare(tensor, 0)).bfloat16().named()
    frozen = sum(p.nbytes for name, p in block.items() if not is_trained(name, shape.adapters))
    assert LayerCosts(shape, 2048).frozen_bytes_on(tensor) == frozen


def test_quantised_weights_are_smaller_and_made_whole_twice() -> None:
    plain, nf4 = (weighed(LoraSection(16, quantize=q), pipeline=1, recompute="none") for q in ("none", "nf4"))
    (before, *_), (after, *_) = (memory_parts(p.plan, p.problem.costs) for p in (plain, nf4))
    shape, rates = SHAPES["llama-8b"], plain.problem.pools[0].rates
    values = shape.attention_parameters + shape.mlp_parameters
    assert before is not None
    assert after is not None
    assert before["weights"] - after["weights"] == shape.layers * values * (2 - 4.5 / 8)
    first, then = (p.problem.costs.block(rates, 1.0) for p in (plain, nf4))
    passes = values * MADE_WHOLE_BYTES["nf4"] / rates.memory_bytes_per_s
    assert then.forward - first.forward == pytest.approx(passes)
    assert then.backward - first.backward == pytest.approx(passes)
    modes = (Mode(),)
    working = [p.problem.costs.under(modes, rates, [(1.0, 1)]).working.item(0) for p in (plain, nf4)]
    assert working[1] - working[0] == 2 * shape.hidden * shape.intermediate
    assert any("nf4 blocks" in reason for reason in nf4.plan.reasons)


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


def test_magnitudes_take_passes_over_weights_and_keep_sums() -> None:
    lora, dora = weighed(LoraSection(16)), weighed(LoraSection(16, dora=True))
    rates, shape = lora.problem.pools[0].rates, SHAPES["llama-8b"]
    once, more = (p.problem.costs.block(rates, 1.0).forward for p in (lora, dora))
    outs, weights = (sum(f(p) for p in shape.projections.values()) for f in (lambda p: p[0], lambda p: p[0] * p[1]))
    passes = 2 * (3 * weights + 2 * 2048 * outs) / rates.memory_bytes_per_s
    assert more - once == pytest.approx(passes, rel=1e-6)
    bare = [replace(p.problem.costs, selective_s=0.0) for p in (lora, dora)]
    again = [costs.block(rates, 1.0, mode=Mode("selective")).both for costs in bare]
    assert again[1] - again[0] > 1.2 * passes
    kept = [p.problem.costs.activation_bytes(1.0) for p in (lora, dora)]
    assert kept[1] - kept[0] == 2 * 2048 * outs
    modes = (Mode(),)
    working = [p.problem.costs.under(modes, rates, [(1.0, 1)]).working.item(0) for p in (lora, dora)]
    assert working[1] - working[0] == 2 * shape.hidden * shape.intermediate
    first, then = (p.plan.predicted for p in (lora, dora))
    assert first is not None
    assert then is not None
    assert first.step_time_s < then.step_time_s < 1.5 * first.step_time_s


def test_dropout_takes_masks_and_with_magnitudes_another_product() -> None:
    plain, dropping, both = (
        weighed(LoraSection(16, dropout=d, dora=m)) for d, m in ((0, False), (0.1, False), (0.1, True))
    )
    magnitudes = weighed(LoraSection(16, dora=True))
    rates, shape = plain.problem.pools[0].rates, SHAPES["llama-8b"]
    ins = sum(into for _, into in shape.projections.values())
    once, more, *_ = (p.problem.costs.block(rates, 1.0) for p in (plain, dropping))
    assert more.forward - once.forward == pytest.approx(2048 * ins * (MASK_BYTES + 6) / rates.memory_bytes_per_s)
    assert 0 < more.backward - once.backward < more.forward - once.forward
    kept = [p.problem.costs.activation_bytes(1.0) for p in (plain, dropping)]
    assert kept[1] - kept[0] == 2 * 2 * 2048 * ins
    again = [p.problem.costs.activation_bytes(1.0, mode=Mode("selective")) for p in (plain, dropping)]
    assert again[0] == again[1]
    ours, theirs = (p.problem.costs.block(rates, 1.0).forward for p in (both, magnitudes))
    assert ours - theirs > more.forward - once.forward + 0.5 * once.forward


def test_flops_of_a_token_leave_out_what_is_not_made() -> None:
    whole = SHAPES["llama-8b"]
    adapted = asked("llama-8b", LoraSection(16)).shape()
    products = whole.layers * (whole.attention_parameters + whole.mlp_parameters) + whole.vocab * whole.hidden
    assert whole.token_flops(2048) - adapted.token_flops(2048) == 2.0 * products
    assert replace(adapted, adapters=None) == whole


def test_selective_recomputation_of_little_work_takes_as_long_as_asking_does() -> None:
    costs, rates = weighed(LoraSection(16)).problem.costs, weighed(LoraSection(16)).problem.pools[0].rates
    little, much = (costs.block(rates, samples, mode=Mode("selective")).both for samples in (0.1, 64.0))
    assert little == pytest.approx(SELECTIVE_S)
    unasked = replace(costs, selective_s=1e-12)  # zero is for compiled blocks
    assert much == unasked.block(rates, 64.0, mode=Mode("selective")).both > SELECTIVE_S
    compiled = replace(asked("llama-8b", LoraSection(16)), train=TrainSection(compile=True))
    found = weigh(describe_cluster(parse_spec("h100:2", CLASSES), CLASSES), compiled)
    assert found.problem.costs.selective_s == 0.0
    assert found.problem.costs.block(rates, 64.0, mode=Mode("selective")).both < much


def test_logits_are_of_as_many_tokens_as_the_loss_takes_at_a_time() -> None:
    costs = LayerCosts(SHAPES["llama-8b"], 2048)
    assert costs.logits_bytes(1) == 10 * 2048 * 128256
    head = 4 * 4096 * 128256  # its gradient, in fp32 from chunk to chunk; adapters leave the head as it is
    assert costs.logits_bytes(64) == costs.logits_bytes(8) == 10 * (2 << 30) / 4 + head
    assert LayerCosts(asked("llama-8b", LoraSection(16)).shape(), 2048).logits_bytes(8) == 10 * (2 << 30) / 4
    assert costs.logits_bytes(8, tensor=8) == 10 * 8 * 2048 * 128256 / 8


@pytest.mark.parametrize(("rank", "kept"), [(16, False), (256, True)])
def test_narrow_products_of_adapters_are_made_again(rank: int, kept: bool) -> None:
    ours, bare = (LayerCosts(asked("llama-8b", LoraSection(r)).shape(), 2048) for r in (rank, None))
    down = 2 * 2048 * 7 * rank
    more = ours.activation_bytes(1, mode=Mode("selective")) - bare.activation_bytes(1, mode=Mode("selective")) - down
    assert (more > 0.5 * 2 * 2048 * ours._values_out(1)) is kept
