"""A rank's log as the agent passes it on to a launcher that cannot read the file: bounded, whatever the rank prints."""

from __future__ import annotations

import time

from hetctl.comm.contract.events import LogText

EVERY_S = 0.25
PER_SECOND = 64 << 10  # bytes of one rank's log that travel
LAST = 32 << 10  # of its end, where a crash says why


class LogTail:
    """Follows one log from `start`; what exceeds the rate is skipped, and said."""

    def __init__(self, rank: int, path: str, start: int) -> None:
        self.rank, self.path, self.at = rank, path, start
        self.next = 0.0

    def read(self) -> LogText | None:
        """What the rank wrote since the last call, at most PER_SECOND bytes a second."""
        now = time.monotonic()
        if now < self.next:
            return None
        self.next = now + EVERY_S
        return self._take(int(PER_SECOND * EVERY_S))

    def last(self) -> LogText | None:
        """What is left at the end of the run, at most LAST bytes."""
        return self._take(LAST)

    def _take(self, most: int) -> LogText | None:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                skipped = max(0, size - self.at - most)
                file.seek(self.at + skipped)
                data = file.read(most)
        except OSError:
            return None
        self.at += skipped + len(data)
        if not data:
            return None
        return LogText(data.decode("utf-8", "replace"), skipped)
