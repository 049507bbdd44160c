"""The one table of native back ends: a vendor's library, the torch back end that loads it, its device type.

A further vendor is one more row here, a row in the hardware table, and a probe file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NativeName = Literal["nccl", "rccl", "xccl", "gloo"]


@dataclass(frozen=True)
class NativeLibrary:
    """One vendor's native communication library as torch knows it."""

    library: NativeName  # what a person calls it
    torch_backend: str  # what torch.distributed calls it
    device_type: str  # torch device type of the tensors it carries
    visible_devices: str  # the environment variable that selects devices
    selects_by_uuid: bool = False  # whether that variable takes UUIDs
    device_order: str = ""  # the variable that makes its indices follow the PCI bus


NATIVES: dict[str, NativeLibrary] = {
    "nvidia": NativeLibrary("nccl", "nccl", "cuda", "CUDA_VISIBLE_DEVICES", True, "CUDA_DEVICE_ORDER"),
    "amd": NativeLibrary("rccl", "nccl", "cuda", "HIP_VISIBLE_DEVICES"),
    "intel": NativeLibrary("xccl", "xccl", "xpu", "ZE_AFFINITY_MASK"),
    "cpu": NativeLibrary("gloo", "gloo", "cpu", ""),
}
