"""A toy device type for tests: tensors whose memory is the host's, on a device that torch calls `toy`.

As a vendor's package would, it brings its device module to torch and operators that run there (here: the host's), and
one registration each in hetctl's tables of native libraries and of what makes their groups.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hetctl.comm.contract.natives import NATIVES, NativeLibrary
from hetctl.comm.contract.placement import Placement
from hetctl.comm.group import backend
from hetctl.comm.group.group import HetGroup
from hetctl.comm.group.native import MAKERS, Membership
from hetctl.trainer.planning.hardware import CLASSES

USED: Counter[str] = Counter()  # what the library and the device module were asked for
LIBRARY: Any = "toyccl"
KEPT: list[torch.library.Library] = []  # what torch forgets with its last reference


class ToyTensor(torch.Tensor):
    """A tensor on the toy device; `host` is its memory."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> ToyTensor:
        made: ToyTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device="toy:0"
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        USED["record_stream"] += 1

    def tolist(self) -> Any:
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, *args, **(kwargs or {}))


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on the host's memory: its results are on the toy device unless the host is asked for."""
    flat, asked = pytree.tree_leaves((args, kwargs)), kwargs.get("device")
    on_toy = any(isinstance(a, ToyTensor) for a in flat) if asked is None else torch.device(asked).type != "cpu"
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    args, kwargs = pytree.tree_map_only(ToyTensor, lambda t: t.host, (args, kwargs))
    found = function(*args, **kwargs)
    written = {id(t.host): t for t in flat if isinstance(t, ToyTensor)}
    if not on_toy:
        return found
    return pytree.tree_map_only(torch.Tensor, lambda t: written[id(t)] if id(t) in written else ToyTensor(t), found)


class _Event:
    def __init__(self, **_: Any) -> None:
        self.device = torch.device("toy", 0)

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    """In order with everything, as the host is."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        USED["streams"] += 1

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


class _Module:
    """What `torch.get_device_module("toy")` gives."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self._current = _Stream()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        USED["set_device"] += 1

    def current_stream(self, device: Any = None) -> _Stream:
        return self._current

    def set_stream(self, stream: Any) -> None: ...

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    device = stream

    def synchronize(self, device: Any = None) -> None: ...

    def max_memory_allocated(self, device: Any = None) -> int:
        return 1 << 20

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None: ...


class _Group:
    """The toy library's communicator: gloo over the tensors' memory."""

    def __init__(self, membership: Membership) -> None:
        self._group = MAKERS["gloo"](membership)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            USED[name] += 1
            return getattr(self._group, name)(*pytree.tree_map_only(ToyTensor, lambda t: t.host, args))

        return call


def register() -> None:
    """Everything that a vendor's package and hetctl's tables have to say of the device type; once a process."""
    _setup_privateuseone_for_python_backend("toy", _Module())
    _pin_nothing()
    backend._native_group = partial(_native_group, backend._native_group)
    KEPT.extend([torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")])
    KEPT[0].fallback(lambda function, *args, **kwargs: _run(function, *args, **kwargs), "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):  # torch's own fill a tensor that they make larger
        KEPT[1].impl(name, partial(_run, torch.arange), "PrivateUse1")
    add_rows()


def _native_group(plain: Any, options: Any, ranks: tuple[int, ...], placement: Placement) -> Any:
    """Toys' own groups are hetctl's with one island: torch's are made of back ends in C++ alone."""
    toys = placement.island_of_rank[ranks[0]].torch_backend == "toyccl"
    return (HetGroup if toys else plain)(options, ranks, placement)


def _pin_nothing() -> None:
    """torch pins memory for back ends in C++ alone."""
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    for make in (torch.empty, torch.empty_like, torch.zeros):
        plain = lambda *sizes, pin_memory=False, _make=make, **how: _make(*sizes, **how)  # noqa: E731
        setattr(torch, make.__name__, plain)


def add_rows() -> None:
    """Of hetctl's tables: a vendor's library and device type, what makes the library's groups, a device class."""
    NATIVES["toys"] = NativeLibrary(LIBRARY, "toyccl", "toy", "TOY_VISIBLE_DEVICES")
    MAKERS["toyccl"] = _Group
    CLASSES["toy1"] = replace(CLASSES["h200"], name="toy1", vendor="toys", product_names=("Toy",))
