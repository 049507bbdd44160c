"""Causal attention: over all that went before or over a window, its scores as they are or capped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetctl.trainer.families.registry import FAMILIES
from hetctl.trainer.model.norms import SharedNorm
from hetctl.trainer.model.rotary import rotate
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.split_backward import Projection, summed_linear
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare, enter

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MOST_KERNELS = 128


class Attention(nn.Module):
    """Causal grouped-query attention of one layer; of the heads, this rank's share."""

    def __init__(self, shape: ModelShape, layer: int, tensor: TensorShare = ALONE) -> None:
        super().__init__()
        self.head_dim, self.tensor = shape.head_dim, tensor
        self.rotary = not shape.positions and layer not in shape.unrotated
        self.window, self.cap, self.scale = shape.window_of(layer), shape.attention_cap, shape.attention_scale
        q, kv = shape.heads // tensor.degree * shape.head_dim, max(1, shape.kv_heads // tensor.degree) * shape.head_dim
        self.q_proj = Projection(shape.hidden, q, bias=shape.qkv_bias)
        self.k_proj = Projection(shape.hidden, kv, bias=shape.qkv_bias)
        self.v_proj = Projection(shape.hidden, kv, bias=shape.qkv_bias)
        self.o_proj = Projection(q, shape.hidden, bias=shape.out_bias)
        kind = FAMILIES[shape.family].qk_norm
        self.heads_apart = kind == "head"
        sizes = (shape.head_dim, shape.head_dim) if self.heads_apart else (q, kv)
        norms = [SharedNorm(shape, n, whole=not self.heads_apart, tensor=tensor) if kind else None for n in sizes]
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same; cos and sin are [seq, rotary_dim]."""
        batch, seq, _ = x.shape
        x = enter(x, self.tensor)
        q, k = self._heads(self.q_proj(x), self.q_norm), self._heads(self.k_proj(x), self.k_norm)
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = causal_attention(q, k, self._heads(self.v_proj(x)), scale=self.scale, window=self.window, cap=self.cap)
        return summed_linear(self.o_proj, y.transpose(1, 2).reshape(batch, seq, -1), self.tensor)

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """[batch, seq, values] -> [batch, heads, seq, head_dim], behind the norm if there is one."""
        if norm is not None and not self.heads_apart:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        return (norm(x) if norm is not None and self.heads_apart else x).transpose(1, 2)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int = 0, cap: float = 0.0
) -> Tensor:
    """[batch, heads, seq, head_dim] each, fewer heads in k and v where they are grouped.

    A token attends to `window` tokens, itself the last of them (0: all before it); scores are scaled (None: by
    head_dim ** -0.5), then capped at c tanh(x / c). Plain attention takes a device's own kernels, in an order set here,
    not around the model, so that recomputation takes the same; the rest takes flex attention there.
    """
    grouped = q.shape[1] != k.shape[1]
    window = 0 if window >= q.shape[2] else window
    if not window and not cap:
        if q.is_cpu:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        with sdpa_kernel(KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if q.is_cpu:
        return _by_mask(q, k, v, scale=scale, window=window, cap=cap)
    return _flexible(q, k, v, scale=scale, window=window, cap=cap)


def _by_mask(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int, cap: float) -> Tensor:
    """The same by its definition, all scores at once."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(q.shape[2], device=q.device)
    back = at[:, None] - at
    seen = (back >= 0) & (back < (window or q.shape[2]))
    return F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(v.dtype) @ v


def _flexible(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int, cap: float) -> Tensor:
    """The same by torch's flex attention, which skips what a window leaves out."""
    grouped, seen = q.shape[1] != k.shape[1], _window_mask(q.shape[2], window, q.device)
    out: Tensor = _flex()(q, k, v, score_mod=_capped(cap), block_mask=seen, scale=scale, enable_gqa=grouped)
    return out


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # a kernel for each window, length, precision and mode; beyond the limit all scores would be made, silently
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KERNELS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


@cache
def _capped(cap: float) -> Callable[..., Tensor] | None:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped if cap else None


@cache
def _window_mask(seq: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window) if window else i >= j

    return create_block_mask(seen, None, None, seq, seq, device=device)
