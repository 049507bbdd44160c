"""What devices still owe: operations that ended for the host, while kernels run or wait for a rank that is gone."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from hetctl.comm.operation.device import has_streams, module_of
from hetctl.comm.operation.intervals import meet
from hetctl.comm.operation.work import OperationDeadline, reason_of

Extents = list[tuple[int, int]]  # addresses, from the first byte to behind the last


@dataclass(frozen=True, eq=False)
class PendingItem:
    """One of them: what it is, the event behind its kernels, and the memory that later ones have to mind."""

    what: str
    deadline: OperationDeadline | None
    event: Any
    device: torch.device
    extents: Extents | None = None

    def over(self) -> bool:
        """Ask the device; of a thread that never chose one, a question would make a context on the first."""
        with module_of(self.device).device(self.device) if has_streams(self.device) else contextlib.nullcontext():
            return bool(self.event.query())


class PendingDeviceWork:
    """The open ones of a group; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[PendingItem] = deque()  # they end in about this order

    def add(self, item: PendingItem) -> None:
        """Remember one, and forget those that are over."""
        with self._lock:
            self._forget()
            self._open.append(item)

    def on(self, extents: Extents) -> list[Any]:
        """The events behind which this memory may be touched again."""
        with self._lock:
            self._forget()
            return [item.event for item in self._open if item.extents is not None and meet(item.extents, extents)]

    def _forget(self) -> None:
        """Those that are over, up to the first that is not: however far ahead the host is, few are asked about."""
        while self._open and self._open[0].over():
            self._open.popleft()

    def overdue(self) -> str | None:
        """A sentence on one that should have been over by its deadline and is not, if there is any.

        No device is asked before that: a question disturbs a graph that the program may be capturing.
        """
        with self._lock:
            late = [(d, d.deadline) for d in self._open if d.deadline is not None and d.deadline.passed()]
        for item, deadline in late:
            try:
                if not item.over():
                    return f"{item.what} has not ended on its device: {deadline.verdict}"
            except RuntimeError as error:
                if "captur" in str(error):  # a graph is being made: asked again later
                    continue
                return f"{item.what} failed on its device: {reason_of(error)}"
            with self._lock:
                if item in self._open:
                    self._open.remove(item)
        return None
