"""What c10d asks of a process group besides operations: names, sizes, devices, coalescing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.group.native import NativeCommunicator
from hetctl.comm.operation.work import CombinedWork, ProcessGroup, Store


class Identity(ProcessGroup):  # type: ignore[misc]
    """A group that keeps its own name and the like: a Python group has no C++ part that would."""

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    _rank: int
    _size: int
    _name: str
    _desc = "het"
    _count = 0
    _natives: dict[str, NativeCommunicator]
    _store: Store
    _timeout: timedelta
    _batch: list[Any] | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "het"

    getBackendName = name
    _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    setGroupName = _set_group_name
    group_name = property(getGroupName)

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    def getGroupDesc(self) -> str:
        return self._desc

    setGroupDesc = _set_group_desc
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self._natives)]

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._batch = self._batch or [], None
        return CombinedWork(works)
