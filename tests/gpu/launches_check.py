"""How a program that launches far ahead of its device slows every other call to it.

PYTHONPATH=. python3 tests/gpu/launches_check.py

One thread launches kernels without end, another copies 1 MiB at a time to the host on a stream of its own, as a bridge
does. A line for each kind of kernel and number of launches that the first one may be ahead.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

SECONDS, TOGETHER, COPIED = 1.5, 50, 1 << 20
AHEAD = (200, 500, 900, 0)  # 0: as far as it gets


def launch(kernel: Callable[[], object], ahead: int, stop: threading.Event, count: list[int]) -> None:
    """Launch until `stop`, waiting for what was launched so many kernels before."""
    begun: deque[torch.cuda.Event] = deque()
    while not stop.is_set():
        for _ in range(TOGETHER):
            kernel()
        count[0] += TOGETHER
        event = torch.cuda.Event()
        event.record()
        begun.append(event)
        if ahead and len(begun) > ahead // TOGETHER:
            begun.popleft().synchronize()


def copy(seconds: float) -> list[float]:
    """Seconds of each copy, one after another."""
    stream = torch.cuda.Stream(priority=-1)
    source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    took, end = [], time.perf_counter() + seconds
    with torch.cuda.stream(stream):
        while (began := time.perf_counter()) < end:
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            took.append(time.perf_counter() - began)
    return took


def show(name: str, took: list[float], launched: int) -> None:
    tail = statistics.quantiles(took, n=10)[-1]
    print(
        f"{name:24} {len(took) / SECONDS:7,.0f} copies/s, median {statistics.median(took) * 1e6:4.0f} us, p90 "
        f"{tail * 1e6:4.0f} us, {launched:,} launched",
        flush=True,
    )


def main() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y, few = torch.empty_like(x), torch.zeros(1024, device="cuda")
    kernels: dict[str, Callable[[], object]] = {
        "products": lambda: torch.mm(x, x, out=y),
        "additions": lambda: torch.add(x, x, out=y),
        "small": lambda: few.add_(1),
    }
    copy(0.3)
    show("alone", copy(SECONDS), 0)
    for name, kernel in kernels.items():
        for ahead in AHEAD:
            stop, count = threading.Event(), [0]
            thread = threading.Thread(target=launch, args=(kernel, ahead, stop, count))
            thread.start()
            time.sleep(0.5)
            took = copy(SECONDS)
            stop.set()
            thread.join()
            torch.cuda.synchronize()
            show(f"{name}, {ahead or 'no limit'}", took, count[0])


if __name__ == "__main__":
    main()
