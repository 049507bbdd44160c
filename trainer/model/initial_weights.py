"""Weights as training starts, of seed, name and position alone: the same bits on any device and in any layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetctl.trainer.families.registry import family_of
from hetctl.trainer.model.adapters import DOWN, MAGNITUDE, UP, is_trained
from hetctl.trainer.model.huggingface import WeightFiles
from hetctl.trainer.model.quantised import dequantise, quantise
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.split_backward import norms_of_rows
from hetctl.trainer.model.splitmix import mixed
from hetctl.trainer.model.tensor_cuts import quantised_as, whole_shape

CHUNK = 1 << 22  # elements made at a time
_HALVES = 8  # 16-bit uniforms summed to one value: near-normal, never beyond 4.9 standard deviations
_DEVIATION = math.sqrt(_HALVES * (65536**2 - 1) / 12)
_MEAN = _HALVES * 65535 / 2


def start_of(
    name: str, shape: ModelShape, files: WeightFiles | None, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One parameter, whole, as training starts: that of a folder, which has no adapters, or a random one.

    Magnitudes are the norms of their weight's rows; quantised weights are bytes, [rows, `row_bytes`]. Raises
    ConfigError for what the folder lacks.
    """
    if name.endswith(MAGNITUDE):
        weight = name.replace(MAGNITUDE, "weight")
        rows = start_of(weight, shape, files, seed=seed, dtype=dtype, device=device)
        return norms_of_rows(value_of(weight, rows, shape, dtype))
    size = whole_shape(name, shape)
    if files is not None and not (shape.adapters and is_trained(name, shape.adapters)):
        value = files.read(name, size)
    else:
        value = initial(name, size, shape, seed=seed, dtype=dtype, device=device)
    kind = quantised_as(name, shape)
    return quantise(value.to(device), kind) if kind else value


def value_of(name: str, kept: Tensor, shape: ModelShape, dtype: torch.dtype) -> Tensor:
    """A parameter as numbers: in `dtype` what its bytes come to, if it is quantised."""
    kind = quantised_as(name, shape)
    return dequantise(kept, kind, whole_shape(name, shape)[1], dtype) if kind else kept


def initial(
    name: str, size: Sequence[int], shape: ModelShape, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A random parameter, whole: norms by 1, biases 0, matrices normal(0, 0.02), residuals less.

    Adapters add nothing yet: one factor is 0, the other normal with the variance that PEFT's uniform one has.
    """
    value = torch.empty(tuple(size), dtype=dtype, device=device)
    if name.endswith("norm.weight"):
        return value.fill_(0.0 if family_of(shape.family).norm == "rms+1" else 1.0)
    if value.dim() < 2 or f".{UP}." in name:
        return value.zero_()
    deep = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / (math.sqrt(2 * shape.layers) if deep else 1.0)
    fill_normal(value, seed=seed, name=name, std=1 / math.sqrt(3 * size[1]) if f".{DOWN}." in name else std)
    return value


def fill_normal(out: Tensor, *, seed: int, name: str, std: float, first: int = 0) -> None:
    """Fill the contiguous `out` with elements first, first+1, ... of the normal(0, std) sequence of (seed, name).

    Whole numbers are added (Irwin-Hall) and scaled once, because log and cos differ between devices in their last bit.
    """
    flat = out.detach().view(-1)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        begin = 2 * (first + start)
        counter = torch.arange(begin, begin + 2 * part.numel(), dtype=torch.int64, device=out.device)
        words = mixed(counter, key)
        halves = sum((words >> shift) & 0xFFFF for shift in range(0, 64, 16))
        sums = halves.view(-1, 2).sum(1)  # type: ignore[union-attr]
        part.copy_((sums.to(torch.float64) - _MEAN) * (std / _DEVIATION))
