"""Compiled blocks keep for backward what eager ones keep."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from hetctl.trainer.model.activations import Recompute
from hetctl.trainer.model.adapters import Adapters, is_trained
from hetctl.trainer.model.block_formats import Quantised
from hetctl.trainer.model.compilation import compile_model
from hetctl.trainer.model.model import StageModel
from tests.trainer.loop.test_parity import ALL_LINEAR
from tests.trainer.parity import SHAPE, initialise


def kept(quantised: Quantised, recompute: Recompute, *, compiled: bool) -> tuple[int, torch.Tensor]:
    """Bytes that a block keeps for backward, and the gradient of its input."""
    adapters = Adapters(3, 6.0, ALL_LINEAR, quantised=quantised)
    shape = replace(SHAPE, head_dim=64, intermediate=256, layers=2, adapters=adapters)
    model = StageModel(shape, (0, 2), recompute=recompute).float()
    initialise(model, 0)
    for name, parameter in model.named().items():
        parameter.requires_grad_(is_trained(name, shape.adapters))
    if compiled:
        assert compile_model(model, samples=2, seq_len=64)
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.layers["0"](x, *model.rotary(x, False, None))
    y.sum().backward()
    assert x.grad is not None
    return sum(found), x.grad


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which torch.compile asks for: apt-get install g++")
def test_what_is_computed_again_with_quantised_weights_is_not_kept_when_compiled() -> None:
    """On a GPU with torch 2.11, 1.25 GiB a block of Llama-8B were (16,384 tokens)."""
    eager, plain = kept("nf4", "full", compiled=False)
    compiled, fused = kept("nf4", "full", compiled=True)
    assert compiled == eager
    assert torch.allclose(plain, fused, rtol=1e-3, atol=1e-4)
