"""A queue and the thread that works it off in order: it starts with the first entry and ends when there is nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

IDLE_SECONDS = 5.0


class TaskQueue:
    """Entries given to `do` one by one, in one thread at a time; `do` raises nothing."""

    def __init__(self, name: str, do: Callable[[Any], None]) -> None:
        self._name, self._do = name, do
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, entry: Any) -> None:
        with self._lock:
            self._queue.put(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def empty(self) -> bool:
        """Whether nothing more is to do; what wakes the thread at its end does not count."""
        return self._queue.empty() or self._closing

    def is_here(self) -> bool:
        """Whether the calling thread is the queue's."""
        return self._thread is threading.current_thread()

    def _work(self) -> None:
        while True:
            try:
                entry = self._queue.get(True, IDLE_SECONDS)
            except queue.Empty:
                entry = None
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            if entry is not None:
                self._do(entry)
                continue
            with self._lock:
                if self._queue.empty() or self._closing:
                    self._thread = None
                    return

    def rest(self, *, seconds: float) -> None:
        """Wait until the thread has let go of what it did last: as its last holder it may leave Python's lock and take
        it again: where Python ends meanwhile, that aborts the process."""
        with self._lock:
            if self._thread is None or self._thread is threading.current_thread():
                return
            self._queue.put(rested := threading.Event())
        rested.wait(seconds)

    def close(self, *, seconds: float) -> None:
        """Do what is queued and end the thread."""
        with self._lock:
            thread, self._closing = self._thread, True
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
