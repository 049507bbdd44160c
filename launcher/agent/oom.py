"""Whether the kernel killed a process for lack of memory: from the cgroup's counter, or the kernel's own log."""

from __future__ import annotations

import contextlib
import os
import re

_KILLED = re.compile(r"Killed process (\d+)")


class OomWatch:
    """Knows the cgroup's count of such kills, and the end of the kernel's log, from before the workers were started."""

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.before = self._count()
        self._named: set[int] = set()
        self._log = self._open_log()

    def killed(self, pid: int) -> bool | None:
        """Whether it was so for `pid`; None where nothing on this host tells."""
        named, now = self._log_names(pid), self._count()
        counted = now is not None and self.before is not None and now > self.before
        if counted and self.before is not None:
            self.before += 1  # this one; the next rank that somebody kills is no victim of the same kill
        if named or counted:
            return True
        return named if now is None or self.before is None else False

    def _count(self) -> int | None:
        """Kills in this process's memory cgroup, version 2 or 1."""
        try:
            with open(os.path.join(self.root, "proc/self/cgroup"), encoding="utf-8") as file:
                groups = [line.strip().split(":", 2) for line in file]
        except OSError:
            return None
        for _, controllers, path in groups:
            if controllers == "":
                names = [f"sys/fs/cgroup{path}/memory.events", "sys/fs/cgroup/memory.events"]
            elif "memory" in controllers.split(","):
                names = [f"sys/fs/cgroup/memory{path}/memory.oom_control", "sys/fs/cgroup/memory/memory.oom_control"]
            else:
                continue
            for name in names:
                found = _oom_kills(os.path.join(self.root, name))
                if found is not None:
                    return found
        return None

    def _open_log(self) -> int | None:
        """The kernel's log, from its end on: process numbers in older entries are others' by now."""
        try:
            handle = os.open(os.path.join(self.root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(handle, 0, os.SEEK_END)
            return handle
        except OSError:
            return None

    def _log_names(self, pid: int) -> bool | None:
        """Whether the kernel's log names the pid; None where it may not be read."""
        if self._log is None:
            return None
        with contextlib.suppress(OSError):  # BlockingIOError is its end
            while entry := os.read(self._log, 8192):
                self._named |= {int(found) for found in _KILLED.findall(entry.decode("utf-8", "replace"))}
        return pid in self._named


def _oom_kills(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            pairs = dict(line.split() for line in file if len(line.split()) == 2)
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
