"""Frozen matrices in int8 or NF4 (QLoRA, arXiv 2305.14314): made so once, made whole again for each product.

Blocks lie along rows, codes and then their factor, so that a part of a matrix that is cut between blocks is what
quantising that part gives. bitsandbytes reads the same blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetctl.trainer.model.block_formats import BLOCK, FACTOR_BYTES, Quantised, code_bytes

AT_ONCE = 1 << 24  # values whose indices and fp32 products are held in between
NF4 = (  # appendix E of the paper: quantiles of a normal distribution, of which one is 0 and the outermost are -1 and 1
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def quantise(matrix: Tensor, kind: Quantised) -> Tensor:
    """[rows, values] of any float type -> [rows, `row_bytes`] bytes; the same bits on every device."""
    return torch.cat([_quantised(rows, kind) for rows in matrix.split(_rows_at_once(matrix.shape[1]))])


def dequantise(packed: Tensor, kind: Quantised, values: int, dtype: torch.dtype) -> Tensor:
    """The way back, [rows, values]: products of codes and factors in fp32, rounded once."""
    blocks = packed.view(len(packed), -1, code_bytes(kind) + FACTOR_BYTES)
    whole = torch.empty((*blocks.shape[:2], BLOCK), dtype=dtype, device=packed.device)
    at_once = _rows_at_once(values)
    for out, part in zip(whole.split(at_once), blocks.split(at_once), strict=True):
        codes, factors = _apart(part, kind)
        if kind == "int8":
            levels = codes.view(torch.int8).float().div_(127)
        else:  # one row for two values: index_select is faster than indexing
            levels = _pairs(packed.device).index_select(0, codes.reshape(-1).int()).view(out.shape)
        torch.mul(levels, factors.unsqueeze(-1), out=out)
    return whole.flatten(1)[:, :values]


def quantised_linear(x: Tensor, packed: Tensor, bias: Tensor | None, kind: Quantised) -> Tensor:
    """`x` times a frozen matrix, in the precision of `x`; forward and backward each make it whole for a moment."""
    product: Tensor = _Product.apply(x, packed, bias, kind)  # type: ignore[no-untyped-call]
    return product


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """For each value the index, a byte, of the nearest of at most 256 ascending levels."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, kind: Quantised) -> Tensor:
        ctx.kind, ctx.values = kind, x.shape[-1]
        ctx.save_for_backward(packed)
        return F.linear(x, dequantise(packed, kind, ctx.values, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantise(packed, ctx.kind, ctx.values, gradient.dtype), None, None, None


def _quantised(matrix: Tensor, kind: Quantised) -> Tensor:
    blocks = F.pad(matrix.float(), (0, -matrix.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    factors = blocks.abs().amax(-1, keepdim=True)
    ratios = blocks / factors.clamp(min=torch.finfo(torch.float32).tiny)
    if kind == "int8":
        codes = (ratios * 127).round().to(torch.int8).view(torch.uint8)
    else:
        nearest = nearest_level(ratios, torch.tensor(NF4, device=matrix.device))
        codes = nearest[..., ::2] << 4 | nearest[..., 1::2]
    return torch.cat((codes, factors.view(torch.uint8)), -1).flatten(1)


def _apart(blocks: Tensor, kind: Quantised) -> tuple[Tensor, Tensor]:
    """Codes [rows, blocks, bytes] and factors [rows, blocks] of [rows, blocks, bytes]."""
    codes, factors = blocks.split((code_bytes(kind), FACTOR_BYTES), dim=-1)
    return codes, factors.contiguous().view(torch.float32).squeeze(-1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2]: the levels that a byte of NF4 stands for, the first one in its upper half."""
    byte = torch.arange(256)
    return torch.tensor(NF4)[torch.stack((byte >> 4, byte & 15), 1)].to(device)


def _rows_at_once(values: int) -> int:
    return max(1, AT_ONCE // values)
