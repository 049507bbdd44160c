"""What hetctl.torchcomms needs of torchcomms, for machines where it is not built: the same calls, without its C++.

Written after its TorchCommBackendPy.cpp: a back end gets what is here by position, and no options of an operation.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

BACKENDS: dict[str, Any] = {}


class RedOpType(enum.Enum):
    SUM, PRODUCT, MIN, MAX, AVG, PREMUL_SUM = range(6)


class ReduceOp:
    SUM, MAX, AVG = (SimpleNamespace(type=kind) for kind in (RedOpType.SUM, RedOpType.MAX, RedOpType.AVG))

    @staticmethod
    def PREMUL_SUM(factor: float) -> Any:
        return SimpleNamespace(type=RedOpType.PREMUL_SUM)


class TorchCommBackend:
    """The base of back ends in Python."""


class TorchComm:
    """Hands calls on to a back end."""

    def __init__(self, impl: Any) -> None:
        self._impl = impl

    def get_backend_impl(self) -> Any:
        return self._impl

    def split(self, ranks: list[int], name: str) -> TorchComm | None:
        part = self._impl.split(ranks, name, SimpleNamespace(timeout=timedelta(seconds=60), hints={}, store=None))
        return part and TorchComm(part)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            work = getattr(self._impl, name)(*args)
            return SimpleNamespace(wait=lambda: None) if work is None else work

        return call


def register_backend(name: str, backend: Any) -> None:
    BACKENDS[name] = backend


def new_comm(
    backend: str,
    device: torch.device,
    name: str,
    timeout: timedelta = timedelta(seconds=60),
    store: Any = None,
    hints: dict[str, str] | None = None,
) -> TorchComm:
    impl = BACKENDS[backend]()
    impl.init(device, name, SimpleNamespace(timeout=timeout, store=store, hints=hints or {}))
    return TorchComm(impl)
