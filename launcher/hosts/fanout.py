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

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass
class _Running(Generic[Item]):
    item: Item
    deadline: Deadline
    begin: float


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
    done: queue.SimpleQueue[tuple[int, Value | None, HetctlError | None]] = queue.SimpleQueue()
    waiting = list(enumerate(items))[::-1]
    running: dict[int, _Running[Item]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, item = waiting.pop()
                running[index] = _start(index, item, work, deadline_s, done)
            yield from _late(running)
            finished = _next(done, running)
            if finished is not None and finished[0] in running:
                one = running.pop(finished[0])
                yield HostOutcome(one.item, finished[1], finished[2], time.monotonic() - one.begin)
    finally:
        for one in running.values():  # the caller left early (Ctrl-C): let nothing run on
            one.deadline.expire()


def _start(
    index: int,
    item: Item,
    work: Callable[[Item, Deadline], Value],
    deadline_s: float,
    done: queue.SimpleQueue[tuple[int, Value | None, HetctlError | None]],
) -> _Running[Item]:
    deadline = Deadline(deadline_s)

    def body() -> None:
        try:
            done.put((index, work(item, deadline), None))
        except HetctlError as error:
            done.put((index, None, error))
        except Exception as error:
            done.put((index, None, HetctlError(f"{type(error).__name__}: {error}", hint="this is a defect of hetctl")))

    running = _Running(item, deadline, time.monotonic())
    # a daemon: a name server that never answers must not keep the program from ending
    threading.Thread(target=body, name=f"host-{index}", daemon=True).start()
    return running


def _late(running: dict[int, _Running[Item]]) -> Iterator[HostOutcome[Item, Value]]:
    for index, one in list(running.items()):
        if one.deadline.passed:
            error = timed_out(one.deadline)
            one.deadline.expire()
            del running[index]
            yield HostOutcome(one.item, None, error, time.monotonic() - one.begin)


def _next(
    done: queue.SimpleQueue[tuple[int, Value | None, HetctlError | None]], running: dict[int, _Running[Item]]
) -> tuple[int, Value | None, HetctlError | None] | None:
    if not running:
        return None
    first = min(one.deadline.left() for one in running.values())
    try:
        return done.get(timeout=first + 0.001)
    except queue.Empty:
        return None
