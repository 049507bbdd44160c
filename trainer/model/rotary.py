"""Rotary positions (RoFormer, arXiv 2104.09864), with the ways in which families stretch them to longer texts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hetctl.trainer.model.shapes import ModelShape, RopeScaling


def rotary_tables(
    seq: int, shape: ModelShape, *, local: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [seq, rotary_dim], both halves alike, in `dtype`; made in fp32 (fp64 under fp64). `local`: of layers
    with a window, where they have positions of their own."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    powers = torch.arange(0, shape.rotary_dim, 2, dtype=wide, device=device) / shape.rotary_dim
    theta, scaling = shape.rope_theta, shape.rope_scaling
    if local and shape.local_rope_theta is not None:
        theta, scaling = shape.local_rope_theta, None
    frequencies, amplitude = theta**-powers, 1.0
    if scaling is not None:
        frequencies, amplitude = stretched(frequencies, scaling, theta=theta, seq=seq), scaling.attention_factor
    angles = torch.outer(torch.arange(seq, dtype=wide, device=device), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * amplitude).to(dtype), (both.sin() * amplitude).to(dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling, *, theta: float, seq: int) -> Tensor:
    """Frequencies [rotary_dim / 2] as the scaling changes them, for samples of `seq` tokens."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if seq > scaling.original_max_seq_len else scaling.short_factors
        return frequencies / torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)
    return _yarn(frequencies, scaling, theta=theta)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, seq, head_dim] by position, halves paired as in Hugging Face's Llama; of heads larger than
    the tables only their first values."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    half = size // 2
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
