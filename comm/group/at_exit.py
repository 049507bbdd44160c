"""A process that ends while operations are under way, by an exception as a rule: they are ended before Python is.

Python ends threads that ask for its lock once it is ending. In the middle of C++ that must not throw, that is an abort,
and a launcher would see SIGABRT instead of the program's own exit code.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

SECONDS = 2.0  # for a group's threads to end, and before that for what is being sent


class ExitHook(Protocol):
    """What a process group does before its process ends."""

    def end_with_process(self, seconds: float) -> None: ...


_live: weakref.WeakSet[ExitHook] = weakref.WeakSet()
_registered_in = 0  # the process whose end is watched: forked ones have the groups, but not their threads


def end_at_exit(group: ExitHook) -> None:
    """Have a group end with this process, as long as anybody holds it."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        _live.clear()
        # before threads are joined, whose pools may have one that waits for a peer; `atexit` comes after that
        getattr(threading, "_register_atexit", atexit.register)(_end)
    _live.add(group)


def forget_at_exit(group: ExitHook) -> None:
    """It has been destroyed."""
    _live.discard(group)


def _end() -> None:
    if _registered_in == os.getpid():
        for group in list(_live):
            group.end_with_process(SECONDS)
