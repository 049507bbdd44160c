"""Causal attention: over all that went before or over a window, its scores as they are or capped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetctl.trainer.families.registry import FAMILIES
from hetctl.trainer.model.norms import SharedNorm
from hetctl.trainer.model.rotary import rotate
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.split_backward import Projection
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare, enter

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MOST_KERNELS = 128


class SeenTokens:
    """Keys and values of the tokens that a layer has seen, while a text is continued token by token."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All of them so far, with these [batch, heads, further tokens, head_dim] behind."""
        if self._held is not None:
            k, v = (torch.cat(both, dim=2) for both in zip(self._held, (k, v), strict=True))
        self._held = k, v
        return k, v


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
        self.seen: SeenTokens | None = None  # while a text is continued

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] -> the same; cos and sin are [seq, rotary_dim], or of each sample [batch, 1, ..]."""
        batch, seq, _ = x.shape
        x = enter(x, self.tensor)
        q, k = self._heads(self.q_proj(x), self.q_norm), self._heads(self.k_proj(x), self.k_norm)
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v, scale = self._heads(self.v_proj(x)), self.scale
        if self.seen is not None:
            k, v = self.seen.extended(k, v)
        y = causal_attention(q, k, v, scale=scale, window=self.window, cap=self.cap, documents=documents)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1), self.tensor)
        return out

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """[batch, seq, values] -> [batch, heads, seq, head_dim], behind the norm if there is one."""
        if norm is not None and not self.heads_apart:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        return (norm(x) if norm is not None and self.heads_apart else x).transpose(1, 2)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
    documents: Tensor | None = None,
) -> Tensor:
    """[batch, heads, seq, head_dim] each, fewer heads in k and v where they are grouped, and more tokens there where
    those of q are the last of them.

    A token attends to `window` tokens, itself the last of them (0: all before it), and only to those of its own
    document ([batch, seq]: which one each is in); scores are scaled (None: by head_dim ** -0.5), then capped at
    c tanh(x / c). Plain attention takes a device's own kernels, in an order set here, not around the model, so that
    recomputation takes the same; the rest takes flex attention there.
    """
    grouped = q.shape[1] != k.shape[1]
    window = 0 if window >= k.shape[2] else window
    if q.shape[2] < k.shape[2]:
        return _by_mask(q, k, v, scale=scale, window=window, cap=cap, documents=None)
    if not window and not cap and documents is None:
        if q.is_cpu:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        with sdpa_kernel(KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    way = _by_mask if q.is_cpu else _flexible
    return way(q, k, v, scale=scale, window=window, cap=cap, documents=documents)


def positions_in(documents: Tensor) -> Tensor:
    """How far each token [batch, seq] is from the beginning of its document."""
    at = torch.arange(documents.shape[1], device=documents.device)
    begins = documents != documents.roll(1, dims=1)
    begins[:, 0] = True
    return at - torch.where(begins, at, 0).cummax(dim=1).values


def _by_mask(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int, cap: float, documents: Tensor | None
) -> Tensor:
    """The same by its definition, all scores at once."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(k.shape[2], device=q.device)
    back = at[-q.shape[2] :, None] - at
    seen = (back >= 0) & (back < (window or len(at)))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(v.dtype) @ v


def _flexible(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int, cap: float, documents: Tensor | None
) -> Tensor:
    """The same by torch's flex attention, which skips what is left out."""
    grouped, seen = q.shape[1] != k.shape[1], _mask(q.shape[2], window, q.device, documents)
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


@lru_cache(maxsize=64)  # of a step's documents: all layers share one, and what is computed again does
def _mask(seq: int, window: int, device: torch.device, documents: Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i >= j) & (i - j < window) if window else i >= j
        return near if documents is None else near & (documents[b, i] == documents[b, j])

    batch = None if documents is None else documents.shape[0]
    return create_block_mask(seen, batch, None, seq, seq, device=device)
