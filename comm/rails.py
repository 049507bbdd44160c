"""The network lanes between two ranks of different islands: gloo pairs, one per rail, connected when first used."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.c10d import Gloo, PrefixStore, Store

RAILS_VARIABLE = "HETCTL_RAILS"
_KILL_TAG = 2**31 - 1


@dataclass(frozen=True)
class Rail:
    """One gloo pair over one device; rank 0 of the pair sends, rank 1 receives."""

    name: str
    group: Any


class Link:
    """All rails from one rank to another, one direction. Both ends connect when they first use it."""

    def __init__(self, store: Store, name: str, *, sending: bool, timeout: timedelta) -> None:
        self._store, self._name, self._sending, self._timeout = store, name, sending, timeout
        self._lock = threading.Lock()
        self._rails: list[Rail] = []
        self._closed = False

    def rails(self) -> list[Rail]:
        """The rails, connected; blocks until the other end connects too (at most the group's timeout)."""
        with self._lock:
            if not self._rails and not self._closed:
                # its own connection: a blocking read on a shared one would stop every other thread's store access
                store = self._store.clone()
                self._rails = [self._connect(store, index) for index in range(rail_count())]
            return self._rails

    def _connect(self, store: Store, index: int) -> Rail:
        interface, device = _devices()[index % len(_devices())]
        prefix = PrefixStore(f"{self._name}/{index}", store)
        options = Gloo._Options()
        options._timeout, options._threads, options._devices = self._timeout, 1, [device]
        group = Gloo(prefix, 0 if self._sending else 1, 2, options)
        return Rail(f"rail {index} ({interface})", group)

    def kill(self) -> None:
        """End everything pending on these rails, here and at the other end, with an error."""
        self._closed = True
        for rail in list(self._rails):
            break_pair(rail.group, 1 if self._sending else 0)

    def close(self) -> None:
        self._closed = True
        self._rails = []


def break_pair(group: Any, peer: int) -> None:
    """Close a gloo context: gloo does so, for all that is pending, when any one receive on it times out."""
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _KILL_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def rail_count() -> int:
    """Rails per direction: as many as interfaces are named, else more for devices than for a CPU's own memory."""
    asked = os.environ.get(RAILS_VARIABLE)
    if asked:
        return int(asked)
    return max(len(_devices()), 8 if torch.cuda.is_available() else 1)


@functools.cache
def _devices() -> list[tuple[str, Any]]:
    """(interface, gloo device) for each rail of this process; a device is a listening socket and its thread."""
    names = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    if names:
        return [(name, Gloo.create_device(interface=name)) for name in names]
    count = int(os.environ.get(RAILS_VARIABLE) or (8 if torch.cuda.is_available() else 1))
    return [("default interface", Gloo.create_default_device()) for _ in range(count)]
