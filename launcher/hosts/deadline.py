"""One deadline for all the steps of one piece of work, and what to close when it passes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable


class Deadline:
    """Seconds that are left, the step the work is in (`phase`), and closers that end a step which does not return."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.phase = "starting"
        self._end = time.monotonic() + seconds
        self._closers: list[Callable[[], None]] = []
        self._expired = False
        self._lock = threading.Lock()

    def left(self) -> float:
        """Seconds until it passes, 0.0 when it has."""
        return 0.0 if self._expired else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left() <= 0.0

    def on_expiry(self, closer: Callable[[], None]) -> None:
        """Call `closer` when the deadline is expired from outside; at once if it was already."""
        with self._lock:
            if not self._expired:
                self._closers.append(closer)
                return
        _quietly(closer)

    def expire(self) -> None:
        """End the work now: closes what blocks it. Safe from any thread, any number of times."""
        with self._lock:
            self._expired = True
            closers, self._closers = self._closers, []
        for closer in reversed(closers):
            _quietly(closer)


def _quietly(closer: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # it is being given up: nothing it says matters any more
        closer()
