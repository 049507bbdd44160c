"""Device memory straight from CUDA's runtime (HIP's alike), as others map it: made, copied, pinned, flushed.

For device types that have it (`operation.device.has_cuda_runtime`).

PyTorch's allocator may be told to map memory in pieces (`expandable_segments`). Handles between processes do not cover
such memory, and an engine then carries its bytes through sockets without a word: 0.5 GB/s where a peer copy does 90.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.contract.errors import BridgeError
from hetctl.comm.operation.device import has_cuda_runtime

# of the driver API: cuDeviceGetAttribute, cuFlushGPUDirectRDMAWrites
_SUPPORTED, _FLUSH_OPTIONS, _ORDERING = 116, 117, 118
_BY_HOST, _OWNER = 1, 100
_CURRENT_CONTEXT, _TO_OWNER = 0, 100

Flush = Callable[[], None]


class _Block:
    """Memory that goes back to the runtime with its last tensor; torch reads its address here."""

    def __init__(self, nbytes: int) -> None:
        self._free, address = _call("Free"), ctypes.c_void_p()
        code = _call("Malloc")(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if code != 0 or not address.value:
            raise BridgeError(f"the device gives no {nbytes} bytes for the bridge (error {code} of its runtime)")
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self._free(self._address)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes that other processes and NICs can map. Raises BridgeError."""
    with torch.cuda.device(device):
        return torch.as_tensor(_Block(nbytes), device=device)


def start_copy(target: int, source: int, nbytes: int, stream: Any) -> None:
    """Copy bytes between addresses of this device, or of pinned host memory, behind what `stream` has to do.

    For memory that stays until the copy is over, which nobody watches here. By address, because a chunk's time is
    Python's, of which tensors that are sliced for `copy_` take several times as much. Raises BridgeError.
    """
    if nbytes:  # an empty tensor may have no address
        _check(_call("MemcpyAsync")(target, source, nbytes, _EITHER_WAY, stream.cuda_stream))


def await_stream(stream: Any) -> None:
    """Block the host until a stream has done everything so far. Raises BridgeError."""
    _check(_call("StreamSynchronize")(stream.cuda_stream))


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pin mapped host memory for a device's copy engines; False where no runtime could pin it.

    Raises RuntimeError: memory that is not pinned after all would be silently slow.
    """
    if not has_cuda_runtime(device):
        return False
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"the device's driver does not pin shared memory (error {int(code)})")
    return True


def unpin(memory: torch.Tensor) -> None:
    """Undo what `pin` has done."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def registrable_device() -> int | None:
    """The number of this process's device, if engines can register its memory."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


_EITHER_WAY = 4  # cudaMemcpyDefault, hipMemcpyDefault: the addresses tell
_ARGUMENTS: dict[str, list[Any]] = {
    "MemcpyAsync": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
    "StreamSynchronize": [ctypes.c_void_p],
}


def _check(code: int) -> None:
    if code != 0:
        raise BridgeError(f"a copy of the bridge failed on the device (error {code} of its runtime)")


@functools.cache
def _call(name: str) -> Any:
    """A function of the runtime library, without its prefix."""
    runtime, prefix = _runtime()
    found = getattr(runtime, f"{prefix}{name}")
    if name in _ARGUMENTS:
        found.argtypes = _ARGUMENTS[name]
    return found


@functools.cache
def _runtime() -> tuple[ctypes.CDLL, str]:
    """The runtime library that torch itself has loaded, and what its functions' names begin with."""
    name, prefix = ("libamdhip64", "hip") if torch.version.hip is not None else ("libcudart", "cuda")
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split(maxsplit=5)[-1]
        if Path(file).name.startswith(name):
            return ctypes.CDLL(file), prefix
    raise BridgeError(f"torch has loaded no {name}, whose memory the bridge would register")


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
        return (lambda: None), ""
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
