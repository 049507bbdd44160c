"""Device memory straight from the driver's runtime, for what another process or a NIC is to map, and copies of it.

PyTorch's allocator may be told to map memory in pieces (`expandable_segments`). Handles between processes do not cover
such memory, and an engine then carries its bytes through sockets without a word: 0.5 GB/s where a peer copy does 90.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.contract.errors import BridgeError


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


def start_copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between addresses of this device, or of pinned host memory, behind what `stream` has to do.

    For memory that stays until the copy is over, which nobody watches here. By address, because a chunk's time is
    Python's, of which tensors that are sliced for `copy_` take several times as much. Raises BridgeError.
    """
    if nbytes:  # an empty tensor may have no address
        _check(_call("MemcpyAsync")(target, source, nbytes, _EITHER_WAY, stream))


def await_stream(stream: int) -> None:
    """Block the host until a stream has done everything so far. Raises BridgeError."""
    _check(_call("StreamSynchronize")(stream))


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
