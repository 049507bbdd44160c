"""A rank's predicted memory by use: the uses add up to the prediction, and follow what is shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.values import decode, encode
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.predicted_step import USES, PredictedStep, memory_parts
from hetctl.trainer.recipe import load_recipe


def planned(spec: str, model: str, **more: Any) -> Planning:
    sets = [("model.name", model), ("model.seq_len", 2048), ("batch.global_batch", 32), *more.items()]
    return weigh(describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, sets))


@pytest.mark.parametrize(
    ("spec", "model", "sets"),
    [
        ("h200:2,mi325x:2", "llama-8b", {}),
        ("h200:4", "llama-8b", {"train.sharded": "all"}),
        ("h200:2,mi325x:2", "llama-8b", {"train.sharded": "replicas", "parallelism.data": 2}),
        ("h200:1,mi325x:1", "llama-1b", {"optimizer.name": "sgd"}),
    ],
)
def test_the_uses_of_every_rank_add_up_to_its_prediction(spec: str, model: str, sets: dict[str, Any]) -> None:
    made = planned(spec, model, **sets)
    assert made.plan.predicted is not None
    for parts, need in zip(PredictedStep.of(made).memory, made.plan.predicted.memory_bytes, strict=True):
        assert parts is not None
        assert tuple(parts) == USES
        assert sum(parts.values()) == need
        assert min(parts.values()) >= 0
        assert parts["weights"] > 0


def test_a_device_alone_holds_a_copy_gradients_masters_and_moments() -> None:
    made = planned("h200:1", "llama-1b")
    (parts,) = PredictedStep.of(made).memory
    assert parts is not None
    parameters = made.problem.costs.shape.parameters
    of_each = [parts[use] / parameters for use in USES[:3]]
    assert of_each == pytest.approx([2, 4, 12], rel=0.01)  # bf16, fp32, fp32 masters and both moments
    assert parts["activations"] > 0


def test_a_plan_whose_prediction_is_of_less_than_its_state_is_not_split_up() -> None:
    made = planned("h200:1", "llama-1b")
    assert made.plan.predicted is not None
    edited = replace(made.plan, predicted=replace(made.plan.predicted, memory_bytes=(1 << 20,)))
    assert memory_parts(edited, made.problem.costs) == [None]
    assert memory_parts(replace(made.plan, predicted=None), made.problem.costs) == [None]


def test_it_travels_as_json() -> None:
    step = PredictedStep.of(planned("h200:1,mi325x:1", "llama-1b"))
    assert decode(PredictedStep, encode(step), where="here") == step
