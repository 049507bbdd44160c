"""The one table of native back ends: a vendor's library, the torch back end that loads it, its device type.

A further vendor is one more row here and a probe file (docs/adding-a-vendor.md); a further library also says how it
is made in `group/native.py`. What ranks do on a device type goes through `operation/device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetctl.comm.contract.errors import ConfigError

NativeName = Literal["nccl", "rccl", "xccl", "mccl", "gloo"]
HOST = "cpu"  # the device type without streams, and the vendor of ranks that compute there


@dataclass(frozen=True)
class NativeLibrary:
    """One vendor's native communication library as torch knows it."""

    library: NativeName  # what a person calls it
    torch_backend: str  # what torch.distributed calls it
    device_type: str  # torch device type of the tensors it carries
    visible_devices: str  # the environment variable that selects devices
    selects_by_uuid: bool = False  # whether that variable takes UUIDs
    device_order: str = ""  # the variable that makes its indices follow the PCI bus
    wheels: str = ""  # pytorch.org's index of torch for it; '' where only the vendor has one
    fabric_library: str = ""  # how the library begins through which it uses libfabric; '' where none is known
    driver_module: str = ""  # the kernel module whose version is the driver's
    trains: bool = True  # whether its groups are made here (`group/native.py`)
    driver_node: str = ""  # what a loaded driver shows: without any, nobody need import torch to look for devices


NATIVES: dict[str, NativeLibrary] = {
    "nvidia": NativeLibrary(
        "nccl",
        "nccl",
        "cuda",
        "CUDA_VISIBLE_DEVICES",
        True,
        "CUDA_DEVICE_ORDER",
        wheels="cu128",
        fabric_library="libnccl-net",
        driver_module="nvidia",
        driver_node="/dev/nvidiactl",
    ),
    "amd": NativeLibrary(
        "rccl",
        "nccl",
        "cuda",
        "HIP_VISIBLE_DEVICES",
        wheels="rocm7.2",
        fabric_library="lib[nr]ccl-net",
        driver_module="amdgpu",
        driver_node="/dev/kfd",
    ),
    "intel": NativeLibrary("xccl", "xccl", "xpu", "ZE_AFFINITY_MASK", wheels="xpu", fabric_library="libfabric"),
    "hygon": NativeLibrary(
        "rccl", "nccl", "cuda", "HIP_VISIBLE_DEVICES", driver_node="/dev/kfd"
    ),  # torch takes it for HIP
    "mthreads": NativeLibrary("mccl", "mccl", "musa", "MUSA_VISIBLE_DEVICES", trains=False, driver_node="/dev/mtgpu.0"),
    HOST: NativeLibrary("gloo", "gloo", "cpu", "", wheels="cpu"),
}


def native_of(**wanted: str) -> NativeLibrary:
    """The first row with this `library`, `torch_backend` or `device_type`. Raises ConfigError."""
    for row in NATIVES.values():
        if all(getattr(row, field) == value for field, value in wanted.items()):
            return row
    words = " and ".join(f"{field.replace('_', ' ')} '{value}'" for field, value in wanted.items())
    raise ConfigError(f"no native library has the {words}", hint="the table is comm/contract/natives.py")


def vendor_of(device_type: str, *, hip: bool) -> str:
    """Whose devices torch calls so; HIP's torch calls them as CUDA's does. Raises ConfigError."""
    native_of(device_type=device_type)
    vendors = [vendor for vendor, row in NATIVES.items() if row.device_type == device_type]
    return next((v for v in vendors if hip and NATIVES[v].library == "rccl"), vendors[0])


def device_types() -> list[str]:
    """Every device type of the table, the host's first."""
    return list(dict.fromkeys([HOST, *(row.device_type for row in NATIVES.values())]))


def backend_words(device_type: str) -> str:
    """What torch.distributed is asked for where no bridge is wanted: `cpu:gloo,cuda:nccl`, or on the host `gloo`."""
    kinds = dict.fromkeys([HOST, device_type])
    words = [f"{kind}:{native_of(device_type=kind).torch_backend}" for kind in kinds]
    return ",".join(words) if len(words) > 1 else native_of(device_type=HOST).torch_backend
