"""When a kernel may read what an RDMA NIC wrote into device memory: only behind what the platform guarantees for it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

# of the driver API: cuDeviceGetAttribute, cuFlushGPUDirectRDMAWrites
_SUPPORTED, _FLUSH_OPTIONS, _ORDERING = 116, 117, 118
_BY_HOST, _OWNER = 1, 100
_CURRENT_CONTEXT, _TO_OWNER = 0, 100

Flush = Callable[[], None]


@functools.cache
def flush_for(device: int) -> tuple[Flush | None, str]:
    """What makes received bytes visible to the device's kernels, and '' or why nothing does.

    The host learns of a write's end, then flushes, and only then enqueues the kernel that reads. Where writes are
    ordered for the owning device anyway there is nothing to do. No other way is taken: a buffer that is read too early
    holds old bytes, and nobody notices.
    """
    if torch.version.hip is not None:
        return None, "this platform documents no flush of RDMA writes that a process could ask for"
    if not torch.cuda.is_available():
        return None, "there is no device here"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        supported, options, ordering = (
            _attribute(driver, name, device) for name in (_SUPPORTED, _FLUSH_OPTIONS, _ORDERING)
        )
    except (OSError, AttributeError, RuntimeError) as error:
        return None, f"the device's driver does not say whether RDMA writes become visible: {error}"
    if not supported:
        return None, "the device's driver does not support GPUDirect RDMA for it"
    if ordering >= _OWNER:
        return _nothing, ""
    if options & _BY_HOST:
        return functools.partial(_flush, driver, device), ""
    return None, "neither are RDMA writes ordered for the device's kernels, nor can the host flush them"


def _attribute(driver: ctypes.CDLL, name: int, device: int) -> int:
    value, handle = ctypes.c_int(), ctypes.c_int()
    torch.cuda.init()
    for code in (
        driver.cuDeviceGet(ctypes.byref(handle), device),
        driver.cuDeviceGetAttribute(ctypes.byref(value), name, handle),
    ):
        if code != 0:
            raise RuntimeError(f"error {code}")
    return value.value


def _flush(driver: ctypes.CDLL, device: int) -> None:
    with torch.cuda.device(device):
        code = driver.cuFlushGPUDirectRDMAWrites(_CURRENT_CONTEXT, _TO_OWNER)
    if code != 0:
        raise RuntimeError(f"the device's driver did not flush RDMA writes (error {code}): what arrived is not read")


def _nothing() -> None:
    return None
