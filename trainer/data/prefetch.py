"""The next step's batch, made while this step computes: read, cut to this rank's samples, and pinned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make(step)` one step ahead in a thread of its own; any step may be asked for."""

    def __init__(self, make: Callable[[int], T], *, steps: int, begin: Callable[[], None] | None = None) -> None:
        """`begin` is called first in the thread (to choose its device)."""
        self._make, self._steps = make, steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=begin)
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """The batch of `step`; what went wrong in making it is raised here."""
        held, self._ahead = self._ahead, None
        batch = held[1].result() if held and held[0] == step else self._make(step)
        if step + 1 < self._steps:
            self._ahead = (step + 1, self._thread.submit(self._make, step + 1))
        return batch

    def forget(self) -> None:
        """What is being made is for another share of the work: throw it away."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    def close(self) -> None:
        """End the thread; what it is making is thrown away."""
        self._thread.shutdown(wait=True, cancel_futures=True)
