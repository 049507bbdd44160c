"""What a device really takes for each kind of layer: the trainer's own modules, timed forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from hetctl.trainer.buckets import Piece
from hetctl.trainer.models.headloss import head_loss
from hetctl.trainer.models.model import RMSNorm, StageModel
from hetctl.trainer.models.shapes import ModelShape
from hetctl.trainer.optimizer import build_optimizer
from hetctl.trainer.planning.profile import ClassProfile, Point
from hetctl.trainer.recipe import OptimizerSection

BLOCKS = 4  # timed in a row, so that launches overlap as they do in training
ROUNDS = 7
WARM_UP = 2
WARM_S = 1.5  # of work before a GPU is timed: its clock falls under load
UPDATED = 1 << 28  # parameters of a timed update, fewer on a CPU

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
                forward, backward = _typical(make(shape, count, seq_len, device, dtype), device)
            except torch.OutOfMemoryError:
                if not points:
                    raise
                break
            points.append(Point(count, forward, backward))
        found[kind] = tuple(points)
    update = _update(device, dtype)
    return ClassProfile(device_class, shape.name, seq_len, found["block"], found["embedding"], found["head"], update)


def _block(shape: ModelShape, samples: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Timed:
    count = min(BLOCKS, max(1, shape.layers - 2))
    with device:
        model = StageModel(shape, (1, 1 + count)).to(dtype) if shape.layers > count + 1 else None
        model = StageModel(shape, (0, shape.layers)).to(dtype) if model is None else model
    blocks = list(model.layers.values())
    _accumulate([p for block in blocks for p in block.parameters()])
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
    _accumulate(list(table.parameters()))
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
    _accumulate([*norm.parameters(), weight])
    x = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(0, shape.vocab, (samples, seq_len), device=device)

    def once() -> tuple[float, float]:
        start = _now(device)
        loss, _ = head_loss(norm(x), weight, targets, scale=1.0 / targets.numel())
        middle = _now(device)
        loss.backward()
        return middle - start, _now(device) - middle

    return once


def _accumulate(parameters: Sequence[nn.Parameter]) -> None:
    """Let backward add gradients up in full precision and drop them, as a step of several micro-batches does."""

    def add(parameter: nn.Parameter, total: torch.Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    for parameter in parameters:
        wide = torch.zeros_like(parameter, dtype=torch.float64 if parameter.dtype == torch.float64 else torch.float32)
        parameter.register_post_accumulate_grad_hook(partial(add, total=wide.detach()))


def _update(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds per parameter of an update as the loop makes it: norm of the gradient, optimiser, copy for computing."""
    count = UPDATED if device.type == "cuda" else UPDATED // 16
    master = torch.zeros(count, device=device)
    weights, master.grad = torch.zeros(count, dtype=dtype, device=device), torch.zeros(count, device=device)
    optimizer = build_optimizer([Piece(master, decays=True)], OptimizerSection())

    def once() -> tuple[float, float]:
        start = _now(device)
        assert master.grad is not None
        torch.linalg.vector_norm(master.grad)
        optimizer.step()
        weights.copy_(master)
        return (_now(device) - start) / count, 0.0

    return _typical(once, device)[0]


def _typical(once: Timed, device: torch.device) -> tuple[float, float]:
    """Medians of several rounds on a device as warm, hence as slow, as training makes it; on CPUs, which others use
    too, lower quartiles. Gradients accumulate, as in training."""
    warm, began = 0, time.perf_counter()
    while warm < WARM_UP or (device.type == "cuda" and time.perf_counter() - began < WARM_S):
        once()
        warm += 1
    rounds = [once() for _ in range(ROUNDS)]
    which = 1 if device.type == "cuda" else 0
    forward, backward = ([r[i] for r in rounds] for i in (0, 1))
    return statistics.quantiles(forward, n=4)[which], statistics.quantiles(backward, n=4)[which]


def _now(device: torch.device) -> float:
    """Seconds on a clock that has waited for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
