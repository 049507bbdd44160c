"""The hardware table: device classes, what they are, and what the planner may assume of them.

`peak_tflops` is the vendor's dense bf16 figure, 0 where none is known: CPUs differ. `sustained_tflops` is what training
reached: published for the classes marked so (arXiv 2602.18007: LLaMA-8B), otherwise the fraction `DEFAULT_MFU` of the
peak; of the CPU it is a guess.
A further vendor is a row here, a row in `comm/contract/natives.py`, and a probe file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetctl.comm.contract.units import GiB

DEFAULT_MFU = 0.45


@dataclass(frozen=True)
class DeviceClass:
    """One kind of accelerator: GPUs that compute alike."""

    name: str
    vendor: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_tflops: float  # dense bf16 (fp16 where the class has no bf16); 0: unknown
    published_tflops: float | None = None  # sustained in training, from a publication
    nic_bytes_per_s: float = 25e9  # the usual NIC beside one such GPU
    native_bytes_per_s: float = 300e9  # to a neighbour in the same host, one way, as collectives reach it
    host_bytes_per_s: float = 25e9  # pinned copies to and from the host, one way
    launch_s: float = 20e-6  # what starting one layer's forward costs, whatever its size
    runtime_bytes: int = 2 * GiB  # context, communicators, workspaces
    product_names: tuple[str, ...] = ()  # substrings of what drivers report, most specific first

    @property
    def sustained_tflops(self) -> float:
        return self.published_tflops or self.peak_tflops * DEFAULT_MFU


def _row(
    name: str,
    vendor: str,
    memory_gib: int,
    memory_gb_per_s: float,
    peak: float,
    *names: str,
    published: float | None = None,
    nic: float = 25e9,
    native: float = 300e9,
    host: float = 50e9,
) -> DeviceClass:
    bandwidth = memory_gb_per_s * 1e9
    return DeviceClass(
        name, vendor, memory_gib * GiB, bandwidth, peak, published, nic, native, host, product_names=names
    )


_ROWS = (
    _row("v100", "nvidia", 32, 900, 125, "V100", nic=12.5e9, native=120e9, host=12e9),
    _row("a10", "nvidia", 24, 600, 125, "A10", nic=12.5e9, native=12e9, host=12e9),
    _row("l4", "nvidia", 24, 300, 121, "L4", nic=12.5e9, native=12e9, host=12e9),
    _row("l40s", "nvidia", 48, 864, 362, "L40S", native=24e9, host=25e9),
    _row("rtx3090", "nvidia", 24, 936, 71, "GeForce RTX 3090", nic=1.25e9, native=12e9, host=12e9),
    _row("rtx4090", "nvidia", 24, 1008, 165, "GeForce RTX 4090", nic=1.25e9, native=12e9, host=12e9),
    _row("rtx5090", "nvidia", 32, 1792, 210, "GeForce RTX 5090", nic=1.25e9, native=24e9, host=25e9),
    _row("a6000", "nvidia", 48, 768, 155, "RTX A6000", nic=12.5e9, native=12e9, host=12e9),
    _row("a100-40g", "nvidia", 40, 1555, 312, "A100-SXM4-40GB", "A100-PCIE-40GB", native=230e9, host=24e9),
    _row("a100", "nvidia", 80, 2039, 312, "A100", native=230e9, host=24e9),
    _row("a800", "nvidia", 80, 2039, 312, "A800", native=160e9, host=24e9),
    _row("h20", "nvidia", 96, 4000, 148, "H20", nic=50e9),
    _row("h100", "nvidia", 80, 3350, 989, "H100", nic=50e9),
    _row("h800", "nvidia", 80, 3350, 989, "H800", nic=50e9, native=160e9),
    _row("h200", "nvidia", 141, 4800, 989, "H200", published=549.7, nic=50e9),
    _row("gh200", "nvidia", 96, 4000, 989, "GH200", nic=50e9),
    _row("b200", "nvidia", 180, 8000, 2250, "B200", nic=50e9, native=600e9),
    _row("gb200", "nvidia", 186, 8000, 2500, "GB200", nic=50e9, native=600e9, host=200e9),
    _row("b300", "nvidia", 270, 8000, 2250, "B300", nic=100e9, native=600e9),
    _row("mi100", "amd", 32, 1228, 92, "MI100", native=80e9, host=24e9),
    _row("mi210", "amd", 64, 1638, 181, "MI210", native=80e9, host=24e9),
    _row("mi250x", "amd", 64, 1638, 191, "MI250X", "MI250", native=100e9, host=24e9),  # one of the package's two dies
    _row("mi300a", "amd", 128, 5300, 980, "MI300A"),
    _row("mi300x", "amd", 192, 5300, 1307, "MI300X", nic=50e9),
    _row("mi308x", "amd", 192, 5300, 390, "MI308X", nic=50e9),
    _row("mi325x", "amd", 256, 6000, 1307, "MI325X", published=534.9, nic=50e9),
    _row("mi350x", "amd", 288, 8000, 2300, "MI350X", nic=50e9),
    _row("mi355x", "amd", 288, 8000, 2500, "MI355X", nic=50e9),
    _row("max1100", "intel", 48, 1229, 352, "Data Center GPU Max 1100", native=24e9, host=25e9),
    DeviceClass("cpu", "cpu", 4 * GiB, 20e9, 0.0, 0.05, 1.25e9, 4e9, 10e9, launch_s=300e-6, runtime_bytes=GiB // 4),
)
CLASSES: dict[str, DeviceClass] = {row.name: row for row in _ROWS}


def class_of_product(vendor: str, product: str) -> DeviceClass | None:
    """The row of a driver's product name: the longest known name in it as a whole word, None when there is none."""
    found = [
        (len(known), row)
        for row in _ROWS
        if row.vendor == vendor
        for known in row.product_names
        if re.search(rf"(?<![A-Z0-9]){re.escape(known.upper())}(?![A-Z0-9])", product.upper())
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None
