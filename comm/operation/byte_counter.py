"""What this process moved across islands, counted: payload sent, and host memory read and written for it."""

from __future__ import annotations

import threading


class ByteCounter:
    """Bytes of payload sent, and bytes of host memory touched by copies and by sockets (not inside the kernel)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        self.touched = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.sent += count

    def touch(self, count: int) -> None:
        with self._lock:
            self.touched += count


METER = ByteCounter()
