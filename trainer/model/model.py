"""The decoder-only transformers that hetctl trains (see `families.py`), cut into stages.

Parameters carry their Hugging Face names, whatever stage they live on. Positions are rotary (RoFormer, arXiv
2104.09864), with the ways in which families stretch them to longer texts, or rows of a learned table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetctl.comm.contract.plan import Span
from hetctl.trainer.model.activations import HostActivations, Recompute, recomputing
from hetctl.trainer.model.families import FAMILIES
from hetctl.trainer.model.head_loss import LossKernel, head_loss, loss_and_gradient
from hetctl.trainer.model.shapes import ModelShape, RopeScaling
from hetctl.trainer.model.split_backward import Projection, WeightGradients
from hetctl.trainer.model.tensor_cuts import cut_of
from hetctl.trainer.model.tensor_parallel import ALONE, SharedVocabulary, TensorShare, embed, enter, leave

EMBEDDING, POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Causal grouped-query attention, rotary unless positions have a table; of the heads, this rank's share."""

    def __init__(self, shape: ModelShape, tensor: TensorShare = ALONE) -> None:
        super().__init__()
        self.head_dim, self.tensor, self.rotary = shape.head_dim, tensor, not shape.positions
        q, kv = shape.heads // tensor.degree * shape.head_dim, max(1, shape.kv_heads // tensor.degree) * shape.head_dim
        self.q_proj = Projection(shape.hidden, q, bias=shape.qkv_bias)
        self.k_proj = Projection(shape.hidden, kv, bias=shape.qkv_bias)
        self.v_proj = Projection(shape.hidden, kv, bias=shape.qkv_bias)
        self.o_proj = Projection(q, shape.hidden, bias=shape.out_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same; cos and sin are [seq, head_dim]."""
        batch, seq, _ = x.shape
        x, inner = enter(x, self.tensor), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for p in inner)
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = causal_attention(q, k, v).transpose(1, 2).reshape(batch, seq, -1)
        return summed_linear(self.o_proj, y, self.tensor)


def summed_linear(layer: Projection, x: Tensor, tensor: TensorShare) -> Tensor:
    """A projection whose columns are shared out: parts are summed over the tensor group, then the bias is added."""
    if tensor.degree == 1:
        whole: Tensor = layer(x)
        return whole
    out = leave(layer.product(x), tensor)
    return out if layer.bias is None else out + layer.bias


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] each, fewer heads in k and v where they are grouped; on a device its own kernels.

    The order of kernels is set here, not around the model, so that recomputation takes the same one.
    """
    grouped = q.shape[1] != k.shape[1]
    if q.is_cpu:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def norm_of(shape: ModelShape) -> nn.Module:
    """A norm as the family has it."""
    kind = nn.LayerNorm if FAMILIES[shape.family].norm == "layer" else nn.RMSNorm
    return kind(shape.hidden, shape.rms_eps)


class MLP(nn.Module):
    """SwiGLU, or as the family has it; of the intermediate values, this rank's share."""

    def __init__(self, shape: ModelShape, tensor: TensorShare = ALONE) -> None:
        super().__init__()
        self.tensor = tensor
        inner = shape.intermediate // tensor.degree
        family = FAMILIES[shape.family]
        self.activation = ACTIVATIONS[family.activations[0]]
        self.gate_proj = Projection(shape.hidden, inner, bias=False) if family.gated else None
        self.up_proj = Projection(shape.hidden, inner, bias=family.mlp_bias)
        self.down_proj = Projection(inner, shape.hidden, bias=family.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.tensor)
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x))
        else:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return summed_linear(self.down_proj, inner, self.tensor)


class Block(nn.Module):
    """One transformer layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: ModelShape, *, recompute: Recompute = "none", tensor: TensorShare = ALONE) -> None:
        super().__init__()
        self.recompute = recompute
        self.self_attn = Attention(shape, tensor)
        self.mlp = MLP(shape, tensor)
        self.input_layernorm = norm_of(shape)
        self.post_attention_layernorm = norm_of(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return recomputing(self._forward, x, cos, sin, recompute=self.recompute)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class StageModel(nn.Module):
    """The layers [first, past_last) of a model, with the embedding before and norm + LM head after where due.

    Of each layer it is this rank's share, where a tensor group computes it.
    """

    def __init__(
        self, shape: ModelShape, layers: Span, *, recompute: Recompute = "none", tensor: TensorShare = ALONE
    ) -> None:
        super().__init__()
        self.shape, self.tensor = shape, tensor
        self.first, self.past_last = layers
        block = (FAMILIES[shape.family].block or (lambda: Block))()
        self.layers = nn.ModuleDict({str(i): block(shape, recompute=recompute, tensor=tensor) for i in range(*layers)})
        words = cut_of(EMBEDDING, shape, degree=tensor.degree, index=tensor.index)
        self.embed_tokens = nn.Embedding(words.shape[0], shape.hidden) if self.is_first else None
        learned = shape.positions and self.is_first
        self.embed_positions = nn.Embedding(shape.positions, shape.hidden) if learned else None
        self.norm = norm_of(shape) if self.is_last else None
        self.lm_head = nn.Linear(shape.hidden, words.shape[0], bias=False) if self.is_last else None
        if shape.tied_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight
        self.loss_kernel: LossKernel = loss_and_gradient
        self._words: dict[str, Any] = {}  # what the loss must know of words that are shared out
        if tensor.degree > 1:
            self.loss_kernel = SharedVocabulary(shape.vocab, tensor)
            self._words = {"total": tensor.sum, "words": words.most}
        self._rotary: tuple[Tensor, Tensor] | None = None
        self.before_unit: Callable[[int], None] = _nothing  # 0 embedding, i + 1 block i, layers + 1 norm and head
        self.before_backward: Callable[[int], None] = _nothing
        self.host_activations: HostActivations | None = None  # None: they stay on the device

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.past_last == self.shape.layers

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [batch, seq] (first stage) or hidden states -> hidden states, or its words' logits (last stage)."""
        hidden = self.body(x)
        if self.lm_head is None:
            return hidden
        logits: Tensor = self.lm_head(hidden)
        return logits

    def body(self, x: Tensor) -> Tensor:
        """The same without the LM head: hidden states, normed on the last stage."""
        hidden = x
        if self.embed_tokens is not None:
            self.before_unit(0)
            hidden = embed(x, self.embed_tokens.weight, vocabulary=self.shape.vocab, tensor=self.tensor)
            if self.embed_positions is not None:
                before = self.shape.positions - self.shape.max_seq_len
                hidden = hidden + self.embed_positions.weight[before : before + x.shape[1]]
        cos, sin = self.rotary(hidden)
        saving = self._saving(cos, sin)
        for number, block in zip(range(self.first, self.past_last), self.layers.values(), strict=True):
            self.before_unit(number + 1)
            with saving():
                hidden = block(hidden, cos, sin)
            hidden = self._announced(hidden, number + 1)
        if self.norm is not None:
            self.before_unit(self.shape.layers + 1)
            hidden = self._announced(self.norm(hidden), self.shape.layers + 1)
        return hidden

    def _saving(self, *tables: Tensor) -> Callable[[], AbstractContextManager[None]]:
        """Around each block of a forward pass: where it saves its activations."""
        if self.host_activations is None or not torch.is_grad_enabled():
            return nullcontext
        self.host_activations.keep(*tables)
        self.host_activations.begin()
        return self.host_activations.unit

    def _announced(self, out: Tensor, unit: int) -> Tensor:
        """The unit's output, which says so when backward comes to it."""
        if out.requires_grad and self.before_backward is not _nothing:
            out.register_hook(lambda _: self.before_backward(unit))
        return out

    def loss(self, x: Tensor, targets: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """(loss times `scale`, to call backward on; sum of the token losses): what the last stage makes."""
        assert self.lm_head is not None
        weight = self.lm_head.weight
        return head_loss(self.body(x), weight, targets, scale=scale, kernel=self.loss_kernel, **self._words)

    def defer_weight_gradients(self, deferred: WeightGradients) -> None:
        """Let `deferred` make the weight gradients of all projections from now on."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.deferred = deferred

    def named(self) -> dict[str, nn.Parameter]:
        """Hugging Face name -> parameter, in layer order; a tied head goes by the embedding's name."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[self.full_name(name)] = parameter
        return found

    def full_name(self, name: str) -> str:
        """The Hugging Face name. A tied head is the embedding's own weight, wherever it lives."""
        if name == "lm_head.weight":
            return EMBEDDING if self.shape.tied_embeddings else name
        return "model." + name

    def rotary(self, like: Tensor) -> tuple[Tensor, Tensor]:
        seq, held = like.shape[1], self._rotary
        if held is None or held[0].shape[0] != seq or held[0].device != like.device or held[0].dtype != like.dtype:
            held = self._rotary = rotary_tables(seq, self.shape, dtype=like.dtype, device=like.device)
        return held


def shapes_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of all parameters of a model, a tied head by the embedding's name."""
    with torch.device("meta"):
        model = StageModel(shape, (0, shape.layers))
    return {name: tuple(parameter.shape) for name, parameter in model.named().items()}


def parameters_of(model: StageModel) -> int:
    """How many parameters a stage holds, a tied one once."""
    return sum(p.numel() for p in model.named().values())


def _nothing(unit: int) -> None:
    """Whole weights on this rank need no preparation."""


def rotary_tables(seq: int, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [seq, head_dim], both halves alike, in `dtype`; made in fp32 (fp64 under fp64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    powers = torch.arange(0, shape.head_dim, 2, dtype=wide, device=device) / shape.head_dim
    frequencies = shape.rope_theta**-powers
    amplitude = 1.0
    if shape.rope_scaling is not None:
        frequencies = stretched(frequencies, shape.rope_scaling, theta=shape.rope_theta)
        amplitude = shape.rope_scaling.attention_factor
    angles = torch.outer(torch.arange(seq, dtype=wide, device=device), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * amplitude).to(dtype), (both.sin() * amplitude).to(dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling, *, theta: float) -> Tensor:
    """Frequencies [head_dim / 2] as the scaling changes them."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, scaling, theta=theta)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, seq, head_dim] by position, halves paired as in Hugging Face's Llama."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: waves longer than the original context are stretched, short ones kept, those between blended."""
    turns = frequencies * scaling.original_max_seq_len / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, *, theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between kept and stretched frequencies."""
    size = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        return size * math.log(scaling.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), size - 1)
    steps = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return ramp * frequencies / scaling.factor + (1 - ramp) * frequencies
