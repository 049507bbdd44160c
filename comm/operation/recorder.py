"""The flight recorder: the last operations of this process in a ring, written as JSON when one fails; and what it moved
across islands, counted."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract import variables
from hetctl.comm.contract.files import write_json

LENGTH = 2000


@dataclass
class RecordedOperation:
    """One operation: times are seconds since the epoch; `ended` is None where no end was seen.

    "posted" is what the native library was given and nobody has waited for: it may have ended unseen.
    """

    number: int
    operation: str
    group: str
    peer: int | None  # global rank, for messages
    bytes: int
    started: float
    ended: float | None = None
    state: Literal["posted", "pending", "done", "failed"] = "pending"
    error: str = ""

    def awaited(self) -> None:
        """The program has begun to wait for it."""
        if self.state == "posted":
            self.state = "pending"

    def end(self, error: BaseException | None) -> None:
        self.ended = time.time()
        self.state = "failed" if error is not None else "done"
        self.error = str(error) if error is not None else ""


class Recorder:
    """A ring of the last operations; entries are changed in place as they end."""

    def __init__(self, length: int = LENGTH) -> None:
        self._ring: deque[RecordedOperation] = deque(maxlen=length)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def begin(self, operation: str, *, group: str, peer: int | None, nbytes: int) -> RecordedOperation:
        entry = RecordedOperation(next(self._numbers), operation, group, peer, nbytes, time.time())
        self._ring.append(entry)
        return entry

    def note(self, sentence: str) -> None:
        """Something that happened to no operation in particular, such as the loss of a rail."""
        now = time.time()
        self._ring.append(RecordedOperation(next(self._numbers), sentence, "", None, 0, now, now, "done"))

    def entries(self) -> list[dict[str, Any]]:
        """The operations in the ring as plain data, oldest first."""
        return [asdict(entry) for entry in list(self._ring)]

    def dump(self, rank: int, *, reason: str) -> Path | None:
        """Write the ring to the folder that HETCTL_FLIGHT_DIR names; None where it is unset."""
        folder = os.environ.get(variables.FLIGHT)
        if not folder:
            return None
        path = Path(folder) / f"flight-rank-{rank}.json"
        with self._lock:
            write_json(path, {"rank": rank, "reason": reason, "time": time.time(), "operations": self.entries()})
        return path


RECORDER = Recorder()


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
