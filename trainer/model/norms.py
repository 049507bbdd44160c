"""Norms as families have them, of hidden states and of heads: RMSNorm (arXiv 1910.07467), by 1 + weight, LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetctl.trainer.families.registry import FAMILIES
from hetctl.trainer.model.head_loss import widened
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_parallel import TensorShare, enter, leave


def norm_of(shape: ModelShape, size: int = 0) -> nn.Module:
    """A norm as the family has it, of hidden states or of so many values."""
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "rms+1": OffsetRMSNorm}[FAMILIES[shape.family].norm]
    norm: nn.Module = kind(size or shape.hidden, shape.rms_eps)
    return norm


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight, as Gemma's does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return _offset(x, self.weight, self.eps)


def _offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In at least fp32: 1 + weight would lose the weight's last bits."""
    wide = widened(x.dtype)
    return F.rms_norm(x.to(wide), weight.shape, 1.0 + weight.to(wide), eps).to(x.dtype)


class SharedNorm(nn.Module):
    """The norm of queries or keys, of which a tensor group's ranks have their part: each head's values by themselves,
    or (`whole`) those of all heads, of which a rank has its own part of the weight."""

    def __init__(self, shape: ModelShape, size: int, *, whole: bool, tensor: TensorShare) -> None:
        super().__init__()
        self.tensor, self.whole, self.eps = tensor, whole, shape.rms_eps
        self.offset = FAMILIES[shape.family].norm == "rms+1"
        self.weight = nn.Parameter(torch.zeros(size) if self.offset else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[.., values] of one head, or of this rank's heads -> the same."""
        if self.whole and self.tensor.degree > 1:
            wide = x.to(widened(x.dtype))
            squares = enter(leave(wide.square().mean(-1, keepdim=True), self.tensor), self.tensor) / self.tensor.degree
            return (wide * torch.rsqrt(squares + self.eps)).to(x.dtype) * self.weight
        weight = self.weight if self.whole else enter(self.weight, self.tensor)  # all ranks' heads make its gradient
        return _offset(x, weight, self.eps) if self.offset else F.rms_norm(x, weight.shape, weight, self.eps)
