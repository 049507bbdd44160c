"""Frozen matrices in fewer bits: what they come to, in parts as in whole, and as bitsandbytes has them."""

from __future__ import annotations

from statistics import NormalDist
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetctl.trainer.model import quantised
from hetctl.trainer.model.block_formats import BLOCK, Quantised, row_bytes
from hetctl.trainer.model.quantised import NF4, dequantise, quantise, quantised_linear

KINDS: list[Quantised] = ["int8", "nf4"]
STEPS = {"int8": 1 / 127, "nf4": NF4[1] - NF4[0]}  # the widest between levels, of a block's largest value


def by_bitsandbytes(blocks: Tensor, kind: Quantised, dtype: torch.dtype) -> Tensor:
    """What bitsandbytes makes of [rows, blocks, bytes]; it knows no fp64."""
    codes, factors = quantised._apart(blocks, kind)
    shape, ops = (len(blocks), blocks.shape[1] * BLOCK), torch.ops.bitsandbytes
    if kind == "nf4":
        whole: Tensor = ops.dequantize_4bit(codes.reshape(-1, 1), factors.reshape(-1), BLOCK, "nf4", shape, dtype)
    else:
        levels = torch.arange(256, dtype=torch.uint8).view(torch.int8).float() / 127
        whole = ops.dequantize_blockwise(codes.reshape(shape), factors.reshape(-1), levels, BLOCK, dtype)
    return whole


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing to compare with")


def weights(rows: int, values: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, values) * torch.rand(rows, 1)


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Equation 4 of the paper in the published form: 8 levels above 0, 7 below, the outermost ones scaled to 1."""
    outermost = 0.9677083
    above = [NormalDist().inv_cdf(outermost + (0.5 - outermost) * k / 8) for k in range(8)]
    below = [-NormalDist().inv_cdf(outermost + (0.5 - outermost) * k / 7) for k in range(7)]
    expected = sorted([*above, *below, 0.0])
    assert [level / above[0] for level in expected] == pytest.approx(NF4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [BLOCK, 3 * BLOCK, 24])
def test_each_value_comes_back_as_the_nearest_level(kind: Quantised, values: int) -> None:
    matrix = weights(7, values)
    packed = quantise(matrix, kind)
    assert packed.shape == (7, row_bytes(kind, values))
    assert packed.dtype == torch.uint8
    back = dequantise(packed, kind, values, torch.float32)
    largest = F.pad(matrix, (0, -values % BLOCK)).view(7, -1, BLOCK).abs().amax(-1)
    off = F.pad((back - matrix).abs(), (0, -values % BLOCK)).view(7, -1, BLOCK).amax(-1)
    assert (off <= largest * STEPS[kind] * 0.501).all()
    assert off.max() > 0
    assert quantise(back, kind).equal(packed), "what is on levels stays there"


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_cut_between_blocks_is_quantised_as_the_whole_is(kind: Quantised) -> None:
    matrix = weights(8, 4 * BLOCK)
    packed = quantise(matrix, kind)
    assert packed[2:6].equal(quantise(matrix[2:6], kind))
    half = packed.shape[1] // 2
    assert packed[:, half:].equal(quantise(matrix[:, 2 * BLOCK :], kind))


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_at_once_make_no_difference(kind: Quantised, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weights(9, 2 * BLOCK)
    packed = quantise(matrix, kind)
    back = dequantise(packed, kind, 2 * BLOCK, torch.bfloat16)
    monkeypatch.setattr(quantised, "AT_ONCE", 5 * BLOCK)
    assert quantise(matrix, kind).equal(packed)
    assert dequantise(packed, kind, 2 * BLOCK, torch.bfloat16).equal(back)


def test_rows_of_zeros_stay_zeros() -> None:
    for kind in KINDS:
        assert not dequantise(quantise(torch.zeros(2, BLOCK), kind), kind, BLOCK, torch.float32).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_matrix_that_comes_back(kind: Quantised, dtype: torch.dtype) -> None:
    packed, bias = quantise(weights(5, 96), kind), torch.randn(5, dtype=dtype)
    x, again = (torch.randn(3, 4, 96, dtype=dtype).requires_grad_() for _ in range(2))
    again.data.copy_(x.data)
    found, wanted = quantised_linear(x, packed, bias, kind), F.linear(again, dequantise(packed, kind, 96, dtype), bias)
    assert found.equal(wanted)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    wanted.backward(gradient)
    assert x.grad is not None
    assert again.grad is not None
    assert x.grad.equal(again.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_whole_is_kept_for_backward(kind: Quantised) -> None:
    packed, kept = quantise(weights(64, 128), kind), list[int]()

    def seen(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        quantised_linear(torch.randn(3, 128, requires_grad=True), packed, None, kind)
    assert sum(kept) == packed.nbytes


def test_bitsandbytes_makes_the_same_codes_of_nf4(library: ModuleType) -> None:
    matrix = weights(64, 4 * BLOCK)
    theirs, state = library.functional.quantize_4bit(matrix, blocksize=BLOCK, quant_type="nf4")
    codes, factors = quantised._apart(quantise(matrix, "nf4").view(64, 4, -1), "nf4")
    assert state.absmax.equal(factors.flatten())
    assert state.code.equal(torch.tensor(NF4))
    differ = (codes.flatten() != theirs.flatten()).nonzero().flatten()
    assert len(differ) < 1e-4 * codes.numel(), "only where a value is as near to two levels"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_makes_the_same_values_of_our_bytes(
    library: ModuleType, kind: Quantised, dtype: torch.dtype
) -> None:
    packed = quantise(weights(64, 4 * BLOCK), kind)
    found = by_bitsandbytes(packed.view(64, 4, -1), kind, dtype)
    assert found.equal(dequantise(packed, kind, 4 * BLOCK, dtype))
