"""What devices still owe: operations that ended for the host, while kernels run or wait for a rank that is gone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetctl.comm.layout import meet
from hetctl.comm.work import Deadline, reason_of

Extents = list[tuple[int, int]]  # addresses, from the first byte to behind the last


@dataclass(frozen=True, eq=False)
class Debt:
    """One of them: how to ask whether it is over, and the event and memory that later ones have to mind."""

    what: str
    deadline: Deadline | None
    over: Callable[[], bool]
    event: Any = None  # torch.cuda.Event
    extents: Extents | None = None


class Owed:
    """The open ones of a group; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collectives: deque[Debt] = deque()  # they end in this order
        self._messages: list[Debt] = []  # in any order, each holding its tensor

    def add(self, debt: Debt) -> None:
        """Remember one, and forget those that are over."""
        with self._lock:
            self._forget()
            (self._messages if debt.event is None else self._collectives).append(debt)

    def on(self, extents: Extents) -> list[Any]:
        """The events behind which this memory may be touched again."""
        with self._lock:
            self._forget()
            return [d.event for d in self._collectives if d.extents is not None and meet(d.extents, extents)]

    def _forget(self) -> None:
        """Those that are over; of collectives up to the first that is not, however far ahead the host is."""
        while self._collectives and self._collectives[0].over():
            self._collectives.popleft()
        self._messages = [debt for debt in self._messages if not debt.over()]

    def overdue(self) -> str | None:
        """A sentence on one that should have been over by its deadline and is not, if there is any.

        No device is asked before that: a question disturbs a graph that the program may be capturing.
        """
        with self._lock:
            for left in (self._collectives, self._messages):
                for debt in list(left):
                    if debt.deadline is None or not debt.deadline.passed():
                        continue
                    try:
                        if not debt.over():
                            return f"{debt.what} has not ended on its device: {debt.deadline.verdict}"
                    except RuntimeError as error:  # the device itself failed
                        return f"{debt.what} failed on its device: {reason_of(error)}"
                    left.remove(debt)
        return None
