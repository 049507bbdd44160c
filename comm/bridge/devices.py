"""Gloo's devices, a listening socket and a thread each, over this rank's interfaces: who may call there, and when.

Gloo takes whoever says a pair's number first, and counts pairs from nought: replayed bytes would get in, and end the
process. So the kernel drops all callers, but for the hosts of a group's ranks while these connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Collection, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from hetctl.comm.bridge.failover import say
from hetctl.comm.contract.callers import admit, own_addresses
from hetctl.comm.operation.work import Gloo, Store

_MAKING = threading.Lock()
_PROCESS = Path("/proc/self")


class Device:
    """A device over an interface (else where this host's name leads), closed to all callers that it does not expect."""

    def __init__(self, interface: str = "") -> None:
        with _MAKING:  # one at a time: its socket is the one that is new
            before = _loops()
            self.gloo = Gloo.create_device(interface=interface) if interface else Gloo.create_default_device()
            self._listener = next(chain.from_iterable(map(_listeners, _loops() - before)), None)
        self._lock, self._expected = threading.Lock(), list[Collection[str]]()
        if not self._admit():
            say(f"this kernel filters no callers: gloo's port on {interface or 'the default interface'} takes any")

    @contextlib.contextmanager
    def expecting(self, addresses: Collection[str]) -> Iterator[None]:
        """Let these call meanwhile."""
        with self._lock:
            self._expected.append(addresses)
            self._admit()
        try:
            yield
        finally:
            with self._lock:
                self._expected.remove(addresses)
                self._admit()

    def _admit(self) -> bool:
        return self._listener is not None and admit(self._listener, chain.from_iterable(self._expected))


def connect(device: Device, store: Store, rank: int, size: int, timeout: timedelta, *, threads: int) -> Any:
    """The gloo group of some ranks, who all say where they call from before any of them lets the others in."""
    keys = [f"callers/{number}" for number in range(size)]
    store.set(keys[rank], json.dumps(own_addresses()))
    store.wait(keys, timeout)
    told = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
    options = Gloo._Options()
    options._timeout, options._threads, options._devices = timeout, threads, [device.gloo]
    with device.expecting(frozenset(chain.from_iterable(map(json.loads, told)))):
        return Gloo(store, rank, size, options)


def main_device() -> Device:
    """The device that native groups use: the first named interface, because a host's name may mean loopback."""
    return Device(next(iter(main_interfaces()), ""))


def main_interfaces() -> list[str]:
    """Those that are named for gloo."""
    return [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]


def _loops() -> set[str]:
    """The descriptors by which threads of this process wait for others."""
    found = set()
    for name in os.listdir(_PROCESS / "fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.readlink(_PROCESS / "fd" / name) == "anon_inode:[eventpoll]":
                found.add(name)
    return found


def _listeners(loop: str) -> Iterator[socket.socket]:
    """The listening sockets that one of them waits for, with descriptors of our own."""
    for number in re.findall(r"tfd:\s+(\d+)", (_PROCESS / "fdinfo" / loop).read_text()):
        with contextlib.suppress(OSError):
            own = os.dup(int(number))
            try:
                found = socket.socket(fileno=own)
            except OSError:  # no socket
                os.close(own)
                continue
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found
