"""Whether the kernel killed a process for lack of memory: from the cgroup's counter, or the kernel's own log."""

from __future__ import annotations

import os
import re

_KILLED = re.compile(r"Killed process (\d+)")


class OomWatch:
    """Knows the cgroup's count of such kills from before the workers were started."""

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.before = self._count()

    def killed(self, pid: int) -> bool | None:
        """Whether it was so for `pid`; None where nothing on this host tells."""
        named = self._log_names(pid)
        if named:
            return True
        now = self._count()
        if now is None or self.before is None:
            return named
        return now > self.before

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

    def _log_names(self, pid: int) -> bool | None:
        """Whether the kernel's log names the pid; None where it may not be read."""
        try:
            handle = os.open(os.path.join(self.root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            for _ in range(100_000):
                found = _KILLED.search(os.read(handle, 8192).decode("utf-8", "replace"))
                if found and int(found[1]) == pid:
                    return True
        except OSError:  # BlockingIOError is its end
            pass
        finally:
            os.close(handle)
        return False


def _oom_kills(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            pairs = dict(line.split() for line in file if len(line.split()) == 2)
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
