"""What a device really takes for each kind of layer: the trainer's own modules, timed forward and backward."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import native_of
from hetctl.comm.operation.device import has_streams, mark, seconds_between, synchronize
from hetctl.trainer.gradients.buckets import ShardPiece
from hetctl.trainer.gradients.optimizer import build_optimizer
from hetctl.trainer.model.activations import Recompute
from hetctl.trainer.model.compute_precision import compute_in
from hetctl.trainer.model.head_loss import head_loss
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.norms import norm_of
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_parallel import ALONE, SharedVocabulary, TensorShare
from hetctl.trainer.planning.profile import ClassProfile, Launches, LayerSizes, OffloadedUpdate, Point
from hetctl.trainer.ranks.emulated_device import at_speed
from hetctl.trainer.recipe import OptimizerSection

BLOCKS = 4  # timed in a row, so that launches overlap as they do in training
ROUNDS = 7  # at least
WARM_UP = 2
WARM_S = 1.5  # of work before a GPU is timed: its clock falls under load
TIMED_S = 2.5  # of a GPU: where it reaches its power limit its clock swings, some 7 % within 1.2 s (H200)
FEW = 32  # tokens of a block that is all launches
UPDATED = 1 << 28  # parameters of a timed update, fewer on a CPU

Reading = Callable[[], tuple[float, float]]  # seconds of one forward and one backward, once the device is through
Timed = Callable[[], Reading]


def measure_class(
    shape: ModelShape,
    seq_len: int,
    *,
    device_class: str,
    device: torch.device,
    samples: Sequence[int] = (1, 2, 4, 8),
    speed: float = 1.0,
    tensor: int = 1,
    precision: Precision | None = None,
    warm_s: float = WARM_S,
    known: ClassProfile | None = None,
) -> ClassProfile:
    """Seconds per layer kind for each number of samples that fits, on a device held to a share of its speed, of one
    rank's part in a tensor group: the job's ranks, if there is one, and all of them measure; otherwise its sums are
    over this process alone. `precision`: other than what is usual there. `warm_s` of work go before each, and
    `known` says of another shape what an update and launches take.

    Raises torch.OutOfMemoryError when not even the first fits, ConfigError where no device can be held back.
    """
    dtype = compute_in(precision or "auto", device)
    work = Workload(shape, seq_len, device, dtype)
    with at_speed(device, speed) as reduced, _part(device, tensor) as part:
        if speed < 1.0 and reduced is None:
            raise ConfigError("only NVIDIA GPUs can be held to a share of their speed", hint="leave --at-speed out")
        block = _points(partial(_block, work, part=part), device, samples, warm_s)
        embedding = _points(partial(_embedding, work), device, samples, warm_s)
        head = _points(partial(_head, work, part=part), device, samples, warm_s)
        update = _update(device, dtype) if known is None else known.update_s
        offloaded, launches = (known.offloaded, known.launches) if known else (None, None)
        if known is None and has_streams(device):
            offloaded, launches = _offloaded_update(device, dtype), _launches(work, part)
    return ClassProfile(
        device_class,
        shape.name,
        seq_len,
        block,
        embedding,
        head,
        update,
        speed,
        tensor,
        precision,
        LayerSizes.of(shape),
        sums=tensor > 1 and dist.is_initialized(),
        offloaded=offloaded,
        launches=launches,
    )


@dataclass(frozen=True)
class Workload:
    """What is timed, and on what."""

    shape: ModelShape
    seq_len: int
    device: torch.device
    dtype: torch.dtype


@contextlib.contextmanager
def _part(device: torch.device, tensor: int) -> Iterator[TensorShare]:
    """This rank's part in a tensor group; without a job the group is this process alone, and sums cost their launch."""
    if tensor == 1:
        yield ALONE
        return
    if dist.is_initialized():
        yield TensorShare(tensor, dist.get_rank(), dist.group.WORLD)
        return
    backend = native_of(device_type=device.type).torch_backend
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield TensorShare(tensor, 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _points(
    make: Callable[[int], Timed], device: torch.device, samples: Sequence[int], warm_s: float
) -> tuple[Point, ...]:
    points: list[Point] = []
    for count in sorted(samples):
        try:
            forward, backward = _typical(make(count), device, warm_s)
        except torch.OutOfMemoryError:
            if not points:
                raise
            break
        points.append(Point(count, forward, backward))
    return tuple(points)


def _block(work: Workload, samples: int, *, part: TensorShare, recompute: Recompute = "none") -> Timed:
    shape, device, dtype = work.shape, work.device, work.dtype
    count = min(BLOCKS, max(1, shape.layers - 2))
    layers = (1, 1 + count) if shape.layers > count + 1 else (0, shape.layers)
    with device:
        model = StageModel(shape, layers, recompute=recompute, tensor=part).to(dtype)
    blocks = list(model.layers.values())
    _accumulate([p for block in blocks for p in block.parameters()])
    x = torch.randn(samples, work.seq_len, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    tables = [model.rotary(x, model.is_local(layer)) for layer in range(*layers)]

    def forward() -> Tensor:
        y = x
        for block, (cos, sin) in zip(blocks, tables, strict=True):
            y = block(y, cos, sin)
        return y

    return _timed(device, forward, torch.randn_like(x), layers=len(blocks))


def _launches(work: Workload, part: TensorShare) -> Launches:
    """Blocks of so few tokens that a device waits for each operation to be launched."""
    few = replace(work, seq_len=FEW)
    modes: tuple[Recompute, ...] = ("selective", "full")
    return Launches(*(Point(1, *_typical(_block(few, 1, part=part, recompute=m), work.device, 0.0)) for m in modes))


def _embedding(work: Workload, samples: int) -> Timed:
    shape, seq_len, device, dtype = work.shape, work.seq_len, work.device, work.dtype
    table = nn.Embedding(shape.vocab, shape.hidden, device=device, dtype=dtype)
    tokens = torch.randint(0, shape.vocab, (samples, seq_len), device=device)
    _accumulate(list(table.parameters()))
    gradient = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device)
    return _timed(device, lambda: table(tokens), gradient)


def _head(work: Workload, samples: int, *, part: TensorShare) -> Timed:
    shape, seq_len, device, dtype = work.shape, work.seq_len, work.device, work.dtype
    norm = norm_of(shape).to(device, dtype)
    low, high = share(shape.vocab, part.degree, part.index)
    weight = nn.Parameter(torch.randn(high - low, shape.hidden, dtype=dtype, device=device) * 0.02)
    shared: dict[str, Any] = {}
    if part.degree > 1:
        shared = {"kernel": SharedVocabulary(shape.vocab, part), "total": part.sum, "words": high - low}
    _accumulate([*norm.parameters(), weight])
    x = torch.randn(samples, seq_len, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(0, shape.vocab, (samples, seq_len), device=device)

    def forward() -> Tensor:
        return head_loss(norm(x), weight, targets, scale=1.0 / targets.numel(), **shared)[0]

    return _timed(device, forward)


def _timed(
    device: torch.device, forward: Callable[[], Tensor], gradient: Tensor | None = None, *, layers: int = 1
) -> Timed:
    """Seconds that one of so many equal layers takes forward, and backward from this gradient (None: from a loss).

    By the device's own clock and without waiting for it: as in training, forward is launched while the backward before
    it runs. Begun on an idle device, a forward pass of small layers takes what its launches do (docs/benchmarks/309).
    """

    def once() -> Reading:
        start = mark(device)
        y = forward()
        middle = mark(device)
        y.backward(gradient)
        end = mark(device)
        return lambda: (seconds_between(start, middle) / layers, seconds_between(middle, end) / layers)

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
    count = UPDATED if has_streams(device) else UPDATED // 16
    master = torch.zeros(count, device=device)
    weights, master.grad = torch.zeros(count, dtype=dtype, device=device), torch.zeros(count, device=device)
    optimizer = build_optimizer([ShardPiece(master, decays=True)], OptimizerSection())

    def once() -> Reading:
        start = mark(device)
        assert master.grad is not None
        torch.linalg.vector_norm(master.grad)
        optimizer.step()
        weights.copy_(master)
        end = mark(device)
        return lambda: (seconds_between(start, end) / count, 0.0)

    return _typical(once, device)[0]


def _offloaded_update(device: torch.device, dtype: torch.dtype) -> OffloadedUpdate:
    """The same in the host's memory, on as many threads as the host lends this process."""
    threads, count = torch.get_num_threads(), UPDATED // 8
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pinned = has_streams(device)
    master, gradient = (torch.zeros(count, pin_memory=pinned) for _ in range(2))
    master.grad, of_device = gradient, torch.zeros(count, device=device)
    weights = torch.zeros(count, dtype=dtype, device=device)
    optimizer = build_optimizer([ShardPiece(master, decays=True)], OptimizerSection())

    def once() -> Reading:
        start = _now(device)
        torch.linalg.vector_norm(of_device)
        gradient.copy_(of_device)
        copied = _now(device)
        optimizer.step()
        updated = _now(device)
        weights.copy_(master, non_blocking=True)  # as buckets do: else torch casts on the host, seven times slower
        copies = copied - start + _now(device) - updated
        return lambda: (copies / count, (updated - copied) / count)

    try:
        return OffloadedUpdate(*_typical(once, device))
    finally:
        torch.set_num_threads(threads)


def _typical(once: Timed, device: torch.device, warm_s: float = WARM_S) -> tuple[float, float]:
    """Medians of rounds on a device as warm, hence as slow, as training makes it; on CPUs, which others use too, lower
    quartiles of a few. Gradients accumulate, as in training."""
    began = 0.0
    for _ in range(WARM_UP):
        began = _now(device)
        once()
        synchronize(device)
    rounds = ROUNDS
    if has_streams(device):
        round_s = time.perf_counter() - began
        for _ in range(_agreed(math.ceil(warm_s / round_s), device)):
            once()
        rounds = _agreed(max(ROUNDS, math.ceil(TIMED_S / round_s)), device)
    readings = [once() for _ in range(rounds)]
    synchronize(device)
    seconds = [read() for read in readings]
    which = 1 if has_streams(device) else 0
    forward, backward = ([s[i] for s in seconds] for i in (0, 1))
    return statistics.quantiles(forward, n=4)[which], statistics.quantiles(backward, n=4)[which]


def _agreed(rounds: int, device: torch.device) -> int:
    """As many as the job's slowest rank: they sum in each."""
    if not dist.is_initialized():
        return rounds
    fewest = torch.tensor(rounds, device=device)
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    return int(fewest)


def _now(device: torch.device) -> float:
    """Seconds on a clock that has waited for all that was launched."""
    synchronize(device)
    return time.perf_counter()
