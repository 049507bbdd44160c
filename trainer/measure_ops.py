"""What a device really takes for each kind of layer: the trainer's own modules, timed forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hetctl.trainer.headloss import head_loss
from hetctl.trainer.model import RMSNorm, StageModel
from hetctl.trainer.profile import ClassProfile, Point
from hetctl.trainer.shapes import ModelShape

BLOCKS = 4  # timed in a row, so that launches overlap as they do in training
ROUNDS = 7
WARM_UP = 2

Timed = Callable[[], tuple[float, float]]  # seconds of one forward and one backward


def measure_class(
    shape: ModelShape,
    seq_len: int,
    *,
    device_class: str,
    device: torch.device,
    dtype: torch.dtype,
    samples: Sequence[int] = (1, 2, 4, 8),
) -> ClassProfile:
    """Seconds per layer kind for each number of samples that fits.

    Raises torch.OutOfMemoryError when not even the first fits.
    """
    kinds = {"block": _block, "embedding": _embedding, "head": _head}
    found: dict[str, tuple[Point, ...]] = {}
    for kind, make in kinds.items():
        points: list[Point] = []
        for count in sorted(samples):
            try:
                forward, backward = _typical(make(shape, count, seq_len, device, dtype))
            except torch.OutOfMemoryError:
                if not points:
                    raise
                break
            points.append(Point(count, forward, backward))
        found[kind] = tuple(points)
    return ClassProfile(device_class, shape.name, seq_len, found["block"], found["embedding"], found["head"])


def _block(shape: ModelShape, samples: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Timed:
    count = min(BLOCKS, max(1, shape.layers - 2))
    with device:
        model = StageModel(shape, (1, 1 + count)).to(dtype) if shape.layers > count + 1 else None
        model = StageModel(shape, (0, shape.layers)).to(dtype) if model is None else model
    blocks = list(model.layers.values())
    x = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    cos, sin = model.rotary(x)
    gradient = torch.randn_like(x)

    def once() -> tuple[float, float]:
        start = _now(device)
        y = x
        for block in blocks:
            y = block(y, cos, sin)
        middle = _now(device)
        y.backward(gradient)
        return (middle - start) / len(blocks), (_now(device) - middle) / len(blocks)

    return once


def _embedding(shape: ModelShape, samples: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Timed:
    table = nn.Embedding(shape.vocab, shape.hidden, device=device, dtype=dtype)
    tokens = torch.randint(0, shape.vocab, (samples, seq_len), device=device)
    gradient = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device)

    def once() -> tuple[float, float]:
        start = _now(device)
        y = table(tokens)
        middle = _now(device)
        y.backward(gradient)
        return middle - start, _now(device) - middle

    return once


def _head(shape: ModelShape, samples: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Timed:
    norm = RMSNorm(shape.hidden, shape.rms_eps).to(device, dtype)
    weight = nn.Parameter(torch.randn(shape.vocab, shape.hidden, dtype=dtype, device=device) * 0.02)
    x = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(0, shape.vocab, (samples, seq_len), device=device)

    def once() -> tuple[float, float]:
        start = _now(device)
        loss, _ = head_loss(norm(x), weight, targets, scale=1.0 / targets.numel())
        middle = _now(device)
        loss.backward()
        return middle - start, _now(device) - middle

    return once


def _typical(once: Timed) -> tuple[float, float]:
    """The lower quartiles of several rounds (others use the machine too); gradients accumulate, as in training."""
    for _ in range(WARM_UP):
        once()
    rounds = [once() for _ in range(ROUNDS)]
    return _quartile([f for f, _ in rounds]), _quartile([b for _, b in rounds])


def _quartile(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]


def _now(device: torch.device) -> float:
    """Seconds on a clock that has waited for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
