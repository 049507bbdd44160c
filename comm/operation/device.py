"""The devices that ranks compute on, whatever their type: torch's module for it, and what this process has.

`torch.get_device_module` gives each type's streams, events, memory and current device by the same names; the host has
such a module too, whose waits do nothing. A further type comes with a row in `contract/natives.py`. What only CUDA's
runtime has (HIP's as well, torch calls both `cuda`) is asked for by `has_cuda_runtime`, never by a type's name.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch

from hetctl.comm.contract import variables
from hetctl.comm.contract.natives import HOST, device_types


@functools.cache
def module_of_type(kind: str) -> Any:
    """torch.cuda, torch.xpu, torch.cpu, ...: looked up once for each type."""
    return torch.get_device_module(kind)


def module_of(device: torch.device) -> Any:
    """The module of a device's type: Stream, Event, current_stream, set_device, synchronize and what else it has."""
    return module_of_type(device.type)


def has_streams(device: torch.device) -> bool:
    """Whether work on it runs behind the host's back, in streams; on the host a call has ended when it returns."""
    return device.type not in (HOST, "meta")  # meta: shapes without values, nothing runs


def has_cuda_runtime(device: torch.device) -> bool:
    """Whether its driver's runtime can be called by ctypes: pinning of mapped memory, copies by address, memory that
    other processes and NICs map, native kernels in graphs, green contexts."""
    return device.type == "cuda"


def passed(event: Any) -> bool:
    """Whether a stream has come past an event; None stands for what was over when its call returned."""
    return event is None or bool(event.query())


def named_device_types() -> list[str]:
    """The device types of the table that this torch has a name for: `musa` comes with its vendor's package."""
    return [kind for kind in device_types() if _has_name(kind)]


def _has_name(kind: str) -> bool:
    try:
        return torch.device(kind).type == kind
    except RuntimeError:
        return False


def accelerator() -> str | None:
    """The first device type of the table that this process can compute on; None where there is the host alone."""
    return next((kind for kind in device_types() if kind != HOST and _is_here(kind)), None)


def _is_here(kind: str) -> bool:
    try:
        return bool(module_of_type(kind).is_available())
    except RuntimeError:  # this torch knows no such type
        return False


def captures_graph(device: torch.device) -> bool:
    """Whether the program is making a graph of what it launches: no event may be asked about then."""
    return has_cuda_runtime(device) and torch.cuda.is_current_stream_capturing()


def settle_current_stream() -> None:
    """Wait for what the program has launched so far, where it uses a device at all."""
    kind = accelerator()
    if kind is not None and module_of_type(kind).is_initialized():
        module_of_type(kind).current_stream().synchronize()


def device_of_type(kind: str) -> torch.device:
    """The device that this rank has of a type: its launcher's choice, or else what the calling thread has chosen."""
    if kind == HOST:
        return torch.device(HOST)
    given = os.environ.get(variables.DEVICE_INDEX) if os.environ.get(variables.DEVICE_TYPE) == kind else None
    return torch.device(kind, module_of_type(kind).current_device() if given is None else int(given))


def rank_device() -> torch.device:
    """The device that this rank was given by its launcher, chosen for the calling thread; the host where none was."""
    device = device_of_type(os.environ.get(variables.DEVICE_TYPE, HOST))
    if has_streams(device):
        module_of(device).set_device(device)
    return device


def peak_device_memory(device: torch.device) -> int | None:
    """The most bytes that tensors of this process have held on a device since its start; None on the host."""
    return int(module_of(device).max_memory_allocated(device)) if has_streams(device) else None


def computes_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16; the host is not asked, which does so slowly."""
    return has_streams(device) and bool(module_of(device).is_bf16_supported())


def mark(device: torch.device) -> Any:
    """This moment on the calling thread's stream of a device: no host waits; on the host, on its monotonic clock."""
    if not has_streams(device):
        return time.monotonic()
    event = module_of(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Of two marks of one device that have been reached."""
    return end - start if isinstance(start, float) else float(start.elapsed_time(end) / 1e3)


def synchronize(device: torch.device) -> None:
    """Wait for everything launched on a device; on the host there is nothing to wait for."""
    module_of(device).synchronize(device)
