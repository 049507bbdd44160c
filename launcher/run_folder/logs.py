"""The ranks' logs as they grow: lines with their rank, control characters gone, floods bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

POLL_S = 0.2
MAX_LINE = 2000
_KEPT = {"\t"}


def clean(line: str) -> str:
    """A line without control characters (a log must not drive the terminal), cut at MAX_LINE characters."""
    kept = "".join(c for c in line if c.isprintable() or c in _KEPT)
    return kept if len(kept) <= MAX_LINE else kept[:MAX_LINE] + f" ... ({len(kept) - MAX_LINE} more characters)"


class Follower:
    """Follows the logs of several ranks in a thread of its own, from their end as it is now (or from `begin`)."""

    def __init__(
        self,
        logs: Mapping[int, Path],
        show: Callable[[int, str], None],
        *,
        begin: Mapping[int, int] | None = None,
    ) -> None:
        self._logs, self._show = dict(logs), show
        self._at = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
        self._at |= {rank: at for rank, at in (begin or {}).items() if rank in logs}
        self._rest: dict[int, bytes] = dict.fromkeys(logs, b"")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read(last=True)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._read(last=False)

    def _read(self, *, last: bool) -> None:
        for rank, path in self._logs.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._at[rank])
                data = file.read()
            self._at[rank] += len(data)
            *lines, rest = (self._rest[rank] + data).split(b"\n")
            if last and rest:
                lines, rest = [*lines, rest], b""
            self._rest[rank] = rest[-MAX_LINE * 4 :]
            for line in lines:
                self._show(rank, clean(line.decode("utf-8", errors="replace")))
