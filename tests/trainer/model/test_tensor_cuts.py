"""Cuts of parameters for tensor groups: every element is held, counted once, and shapes are those of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.model.tensor_cuts import cannot_cut, cut_of, whole_shape
from hetctl.trainer.model.tensor_parallel import TensorShare

SHAPE = ModelShape("tiny", "llama", 2, 16, 8, 2, 24, 49, qkv_bias=True, out_bias=True)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_element_is_held_and_counts_once(degree: int) -> None:
    with torch.device("meta"):
        names = {n: tuple(p.shape) for n, p in StageModel(SHAPE, (0, 2)).named().items()}
    for name, shape in names.items():
        assert whole_shape(name, SHAPE) == shape
        held, counted = torch.zeros(shape), torch.zeros(shape)
        for index in range(degree):
            cut = cut_of(name, SHAPE, degree=degree, index=index)
            part = (cut.dim, cut.low, cut.high - cut.low)
            held.narrow(*part).add_(1)
            counted.narrow(*part).add_(cut.counts)
            assert cut.high - cut.low <= cut.most
        assert held.min() == held.max()
        assert (counted == 1).all()
        copies = int(held.max())
        assert (copies == degree) == (degree == 1 or name.endswith(("norm.weight", "o_proj.bias")))
        if "k_proj" in name:
            assert copies == max(1, degree // SHAPE.kv_heads)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_stage_of_a_group_has_the_shapes_of_its_cuts(degree: int) -> None:
    for index in range(degree):
        with torch.device("meta"):
            model = StageModel(SHAPE, (0, 2), tensor=TensorShare(degree, index))
        for name, parameter in model.named().items():
            assert tuple(parameter.shape) == cut_of(name, SHAPE, degree=degree, index=index).shape


def test_what_does_not_divide_is_refused_with_its_number() -> None:
    assert not cannot_cut(SHAPES["llama-70b"], 8)
    assert "28 heads" in cannot_cut(SHAPES["qwen2-7b"], 8)
    assert "3 key-value heads" in cannot_cut(replace(SHAPE, heads=12, kv_heads=3, hidden=24), 2)
    assert "intermediate" in cannot_cut(replace(SHAPE, intermediate=25), 2)
