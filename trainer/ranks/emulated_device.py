"""A lesser device out of a real one: `@SPEED` computes on some of its multiprocessors, `~MEMORY` caps the allocator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetctl.comm.operation.device import has_cuda_runtime, has_streams, module_of, synchronize

STEP = 8  # multiprocessors are handed out in these units
SIDE, PRODUCTS = 8192, 6  # the matrix product that speeds are compared by
_KEPT: list[Any] = []  # contexts outlive every kernel that was launched in them


@dataclass(frozen=True)
class ReducedSpeed:
    """What a device runs at: a share of its own speed, on so many of its multiprocessors."""

    asked: float
    share: float
    used: int
    total: int

    def __str__(self) -> str:
        return f"{self.share:.2f} of its speed ({self.used} of {self.total} multiprocessors; asked for {self.asked:g})"


def cap_memory(device: torch.device, limit: int | None) -> None:
    """Hold the allocator of a device to `limit` bytes, what the plan counts on; None: to all there is."""
    if not has_streams(device):
        return
    devices = module_of(device)
    total = devices.get_device_properties(device).total_memory
    devices.set_per_process_memory_fraction(1.0 if limit is None else min(limit / total, 1.0), device)


@contextlib.contextmanager
def at_speed(device: torch.device, speed: float) -> Iterator[ReducedSpeed | None]:
    """Compute within at about `speed` of what the device does; None where it stays as it is (1.0, or the host).

    Kernels of the current stream, and of backward passes of what ran there, keep to the chosen multiprocessors; copies
    and native collectives run as ever.
    """
    divisible = has_cuda_runtime(device) and torch.version.hip is None
    if speed < 1.0 and has_streams(device) and not divisible:
        print("an @SPEED needs green contexts, which this build of PyTorch lacks: full speed", flush=True)
    if speed >= 1.0 or not divisible:
        yield None
        return
    whole = _seconds(device)
    total = torch.cuda.get_device_properties(device).multi_processor_count
    tried = [(count, whole / _seconds_on(device, count)) for count in _counts(total, speed)]
    used, share = nearest_share(tried, speed)
    with torch.cuda.stream(_stream(device, used)):
        yield ReducedSpeed(speed, share, used, total)


def nearest_share(tried: Sequence[tuple[int, float]], speed: float) -> tuple[int, float]:
    """The (count, share) whose share comes nearest to the one asked for."""
    return min(tried, key=lambda one: abs(one[1] - speed))


def _counts(total: int, speed: float) -> list[int]:
    """Counts around the asked share: half of the multiprocessors do more than half of the work."""
    middle = round(speed * 0.85 * total / STEP) * STEP
    return [n for n in range(middle - 2 * STEP, middle + 3 * STEP, STEP) if STEP <= n < total]


def _seconds_on(device: torch.device, count: int) -> float:
    with torch.cuda.stream(_stream(device, count)):
        return _seconds(device)


def _stream(device: torch.device, count: int) -> torch.cuda.Stream:
    from torch.cuda.green_contexts import GreenContext

    context: Any = GreenContext.create(num_sms=count, device_id=device.index)
    _KEPT.append(context)
    stream: torch.cuda.Stream = context.Stream()
    return stream


def _seconds(device: torch.device) -> float:
    """Seconds of some matrix products in the current stream."""
    a = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    a @ a
    synchronize(device)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        a @ a
    synchronize(device)
    return time.perf_counter() - began
