"""Files of a run on its host, as the agent writes, follows, reads and sweeps them. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from hetctl.comm.contract.events import LogText

SAID_BYTES = 4096  # of a log's end, where a rank that wrote no error file says why
TERMINATED = "what():"  # before the message of an exception that nobody caught
EVERY_S = 0.25
PER_SECOND = 64 << 10  # bytes of one rank's log that travel
LAST = 32 << 10  # of its end, where a crash says why
FOLDER, LOCK = "hetctl-", "lived-in"  # of an agent, in the host's TMPDIR
SWEEP_FILE = "sweep.json"  # in an agent's folder, so that its guardian knows the patterns, too


def is_full(folder: str) -> bool:
    """Whether a file system has less room than an error message needs."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return False
    return about.f_bavail * about.f_frsize < 64 << 10


def last_words(log: str) -> str | None:
    """The last thing that stands in a log; rather what C++ said when it gave the process up. None when it is empty."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - SAID_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").strip().splitlines()]
        telling = [line.removeprefix(TERMINATED).strip() for line in lines if line.startswith(TERMINATED)]
        # it goes to a terminal, which it must not drive
        return "".join(c for c in (telling or lines)[-1][:300] if c.isprintable()) if lines else None
    return None


def write(path: str, text: str) -> None:
    """A file of the run: readable by its owner only, whole or not there."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def pending(flight: str, rank: int) -> list[dict[str, Any]] | None:
    """What the rank's flight recorder says it was waiting for; None when there is no record."""
    try:
        with open(os.path.join(flight, f"flight-rank-{rank}.json"), encoding="utf-8") as file:
            operations = json.load(file)["operations"]
        return [o for o in operations if o["state"] not in ("done", "posted")][-8:]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(path: str, events: list[dict[str, Any]]) -> None:
    """Keep what nobody heard for the launcher that goes on with the run."""
    with contextlib.suppress(OSError):  # a full disk: they are lost
        write(path, json.dumps(events))


def kept(path: str) -> list[dict[str, Any]]:
    """What was kept, once."""
    try:
        with open(path, encoding="utf-8") as file:
            found: list[dict[str, Any]] = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return []
    return found


class LogTail:
    """A rank's log from `start` on, for a launcher that cannot read it: what exceeds the rate is skipped, and said."""

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


def sweep(patterns: Iterable[str]) -> None:
    """Remove half-made files and folders that a run's dead ranks left: once nothing of it writes there any more."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def sweep_for(folder: str) -> None:
    """Sweep what an agent noted in its folder."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, SWEEP_FILE), encoding="utf-8") as file:
        sweep(json.load(file))


def own_folder() -> str:
    """A new folder of this agent's, 0700, locked for as long as it or its guardian lives.

    Folders of agents that were killed with their guardians are swept and removed: nobody else is left to do it.
    """
    base = tempfile.gettempdir()
    base = base if len(base) < 64 else "/tmp"  # socket paths may have 107 characters only
    for lock in glob.glob(os.path.join(glob.escape(base), FOLDER + "*", LOCK)):
        with contextlib.suppress(OSError):  # it is lived in
            _remove_left(lock)
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=base)
    new = os.path.join(folder, ".new")
    held = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # this process and what it forks hold it
    with contextlib.suppress(OSError):  # without locks in this file system nobody takes it for left
        fcntl.flock(held, fcntl.LOCK_EX)
        os.rename(new, os.path.join(folder, LOCK))
    return folder


def _remove_left(lock: str) -> None:
    about = os.lstat(folder := os.path.dirname(lock))
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return  # somebody else's words are not swept by
    held = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep_for(folder)
        remove(folder)
    finally:
        os.close(held)


def remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
