"""What devices still owe: operations that ended for the host, while kernels run or wait for a rank that is gone."""

from __future__ import annotations

import threading
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
        self._open: list[Debt] = []

    def add(self, debt: Debt) -> None:
        """Remember one, and forget those that are over."""
        with self._lock:
            self._open = [old for old in self._open if not old.over()]
            self._open.append(debt)

    def on(self, extents: Extents) -> list[Any]:
        """The events behind which this memory may be touched again."""
        with self._lock:
            self._open = [old for old in self._open if not old.over()]
            return [old.event for old in self._open if old.extents is not None and meet(old.extents, extents)]

    def overdue(self) -> str | None:
        """A sentence on one that should have been over by its deadline and is not, if there is any.

        No device is asked before that: a question disturbs a graph that the program may be capturing.
        """
        with self._lock:
            for debt in list(self._open):
                if debt.deadline is None or not debt.deadline.passed():
                    continue
                try:
                    if not debt.over():
                        return f"{debt.what} has not ended on its device: {debt.deadline.verdict}"
                except RuntimeError as error:  # the device itself failed
                    return f"{debt.what} failed on its device: {reason_of(error)}"
                self._open.remove(debt)
        return None
