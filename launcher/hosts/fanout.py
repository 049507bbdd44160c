"""The same work on many hosts at once: a deadline each, and every failure becomes that host's outcome."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetctl.comm.contract.errors import HetctlError
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import timed_out

Item = TypeVar("Item")
Value = TypeVar("Value")
MAX_AT_ONCE = 128


@dataclass(frozen=True)
class HostOutcome(Generic[Item, Value]):
    """What became of one item: a value, or the error that stands for it."""

    item: Item
    value: Value | None
    error: HetctlError | None
    seconds: float


def fan_out(
    items: Sequence[Item],
    work: Callable[[Item, Deadline], Value],
    *,
    deadline_s: float,
    at_once: int = MAX_AT_ONCE,
) -> Iterator[HostOutcome[Item, Value]]:
    """Outcomes as they come in, one per item. `work` runs in a thread; at its deadline it is expired and left behind.

    At most `at_once` run at a time; each one's deadline begins when it starts.
    """
    done: queue.SimpleQueue[tuple[int, HostOutcome[Item, Value]]] = queue.SimpleQueue()
    waiting = list(enumerate(items))[::-1]
    running: dict[int, tuple[Item, Deadline]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, item = waiting.pop()
                running[index] = item, Deadline(deadline_s)
                _start(index, *running[index], work, done)
            for index, (item, deadline) in list(running.items()):
                if deadline.passed:
                    error = timed_out(deadline)
                    deadline.expire()
                    del running[index]
                    yield HostOutcome(item, None, error, deadline.seconds)
            first = min((deadline.left() for _, deadline in running.values()), default=0.0)
            try:
                index, outcome = done.get(timeout=first + 0.001)
            except queue.Empty:
                continue
            if running.pop(index, None):
                yield outcome
    finally:
        for _, deadline in running.values():  # the caller left early (Ctrl-C): let nothing run on
            deadline.expire()


def _start(
    index: int,
    item: Item,
    deadline: Deadline,
    work: Callable[[Item, Deadline], Value],
    done: queue.SimpleQueue[tuple[int, HostOutcome[Item, Value]]],
) -> None:
    begin = time.monotonic()

    def body() -> None:
        value, problem = None, None
        try:
            value = work(item, deadline)
        except HetctlError as error:
            problem = error
        except Exception as error:
            problem = HetctlError(f"{type(error).__name__}: {error}", hint="this is a defect of hetctl")
        done.put((index, HostOutcome(item, value, problem, time.monotonic() - begin)))

    # a daemon: a name server that never answers must not keep the program from ending
    threading.Thread(target=body, name=f"host-{index}", daemon=True).start()
