"""Connections to the job's store, shared by all groups of a process.

The store's host looks up who comes for every further one, which can take seconds and holds up everybody, and a group
would take one for each of its threads and peers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from hetctl.comm.operation.work import PrefixStore, Store

_OWN_PREFIXES = 2  # what torch.distributed puts before a group's keys: its name's and its device's


class Connections:
    """Those to one store: one for calls that are answered at once, and some for calls that may wait for others."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._idle: list[Store] = []
        self.talk = store.clone()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Store]:
        """A connection of the caller's own meanwhile: a call that waits would stop every other on it."""
        with self._lock:
            taken = self._idle.pop() if self._idle else None
        if taken is None:
            taken = self._store.clone()
        yield taken  # not used again after an error: it may be in the middle of something
        with self._lock:
            self._idle.append(taken)


_known: weakref.WeakValueDictionary[int, Connections] = weakref.WeakValueDictionary()  # by the identity of a store
_lock = threading.Lock()


class GroupStore:
    """One group's keys in the job's store, over the process's connections."""

    def __init__(self, store: Store, name: str) -> None:
        for _ in range(_OWN_PREFIXES):
            store = store.underlying_store if isinstance(store, PrefixStore) else store
        self._prefix = f"het/{name}/"
        with _lock:
            found = _known.get(id(store))
            if found is None:
                found = _known[id(store)] = Connections(store)
        self._connections = found
        self.talk: Store = PrefixStore(self._prefix, found.talk)  # never to wait on

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Store]:
        """The keys for calls that may wait for other ranks."""
        with self._connections.waiting() as store:
            yield PrefixStore(self._prefix, store)
