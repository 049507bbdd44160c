"""The hardware table: device classes, what they are, and what the planner may assume of them.

`peak_tflops` is the vendor's dense bf16 figure, 0 where none is known: CPUs differ. `sustained_tflops` is what training
reached on LLaMA-8B (roofline.py makes other shapes of it): published for the classes marked so (H200 and MI325X: arXiv
2602.18007; A100 and H100: fitted to LLM Foundry's table, tests/published), otherwise the fraction `DEFAULT_MFU` of the
peak; of the CPU it is a guess.
A further vendor is a row here, a row in `comm/contract/natives.py`, and a probe file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.units import GiB


class Hardware(dict[str, DeviceClass]):
    """Device classes by name; a part of one (`a100/3g.40gb`, `mi300x/cpx`) is found as its share of the whole."""

    def __missing__(self, name: str) -> DeviceClass:
        whole, _, mode = name.partition("/")
        row = self[whole].part(mode) if mode and whole in self else None
        if row is None:
            near = nearest(whole, self)
            own = "--device NAME=vendor:..,tflops:..,memory:..,bandwidth:.. or hardware.yaml makes another known"
            raise ConfigError(f"'{name}' is not a device class hetctl knows", hint=f"{near}; {own}" if near else own)
        return row

    def with_own(self, rows: Iterable[DeviceClass]) -> Hardware:
        """This table with a person's rows before its own."""
        return Hardware(self | {row.name: row for row in rows})

    def of_product(self, vendor: str, product: str) -> DeviceClass | None:
        """The row of a driver's product name, by the longest known name in it as a whole word."""
        found = [
            (len(known), row)
            for row in self.values()
            if row.vendor == vendor
            for known in row.product_names
            if re.search(rf"(?<![A-Z0-9]){re.escape(known.upper())}(?![A-Z0-9])", product.upper())
        ]
        return max(found, key=lambda pair: pair[0])[1] if found else None


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
    slices: int = 0,
    chiplets: int = 0,
) -> DeviceClass:
    row = DeviceClass(name, vendor, memory_gib * GiB, memory_gb_per_s * 1e9, float(peak), published, nic, native, host)
    return replace(row, product_names=names, slices=slices, chiplets=chiplets)


_ROWS = (
    _row("v100", "nvidia", 32, 900, 125, "V100", nic=12.5e9, native=120e9, host=12e9),
    _row("p100", "nvidia", 16, 732, 21.2, "P100", nic=12.5e9, native=60e9, host=12e9),
    _row("v100s", "nvidia", 32, 1134, 130, "V100S", nic=12.5e9, native=12e9, host=12e9),
    _row("t4", "nvidia", 16, 320, 65, "T4", nic=6.25e9, native=12e9, host=12e9),
    _row("rtx2080ti", "nvidia", 11, 616, 53.8, "GeForce RTX 2080 Ti", nic=1.25e9, native=12e9, host=12e9),
    _row("titanrtx", "nvidia", 24, 672, 130.5, "TITAN RTX", nic=1.25e9, native=12e9, host=12e9),
    _row("a30", "nvidia", 24, 933, 165, "A30", nic=12.5e9, native=24e9, host=24e9, slices=4),
    _row("a40", "nvidia", 48, 696, 149.7, "A40", nic=12.5e9, native=24e9, host=24e9),
    _row("a10g", "nvidia", 24, 600, 70, "A10G", nic=12.5e9, native=12e9, host=12e9),
    _row("a10", "nvidia", 24, 600, 125, "A10", nic=12.5e9, native=12e9, host=12e9),
    _row("l4", "nvidia", 24, 300, 121, "L4", nic=12.5e9, native=12e9, host=12e9),
    _row("l20", "nvidia", 48, 864, 119.5, "L20", native=24e9, host=25e9),
    _row("l40", "nvidia", 48, 864, 181, "L40", native=24e9, host=25e9),
    _row("l40s", "nvidia", 48, 864, 362, "L40S", native=24e9, host=25e9),
    _row("rtx3080", "nvidia", 10, 760, 59.5, "GeForce RTX 3080", nic=1.25e9, native=12e9, host=12e9),
    _row("rtx3090", "nvidia", 24, 936, 71, "GeForce RTX 3090", nic=1.25e9, native=12e9, host=12e9),
    _row("rtx4090", "nvidia", 24, 1008, 165, "GeForce RTX 4090", nic=1.25e9, native=12e9, host=12e9),
    _row("rtx5090", "nvidia", 32, 1792, 210, "GeForce RTX 5090", nic=1.25e9, native=24e9, host=25e9),
    _row("a6000", "nvidia", 48, 768, 155, "RTX A6000", nic=12.5e9, native=12e9, host=12e9),
    _row("a5000", "nvidia", 24, 768, 111, "RTX A5000", nic=12.5e9, native=12e9, host=12e9),
    _row("rtx6000ada", "nvidia", 48, 960, 364, "RTX 6000 Ada", nic=12.5e9, native=12e9, host=25e9),
    _row(
        "a100-40g",
        "nvidia",
        40,
        1555,
        312,
        "A100-SXM4-40GB",
        "A100-PCIE-40GB",
        published=190,
        native=230e9,
        host=24e9,
        slices=7,
    ),
    _row("a100", "nvidia", 80, 2039, 312, "A100", published=190, native=230e9, host=24e9, slices=7),
    _row("a800", "nvidia", 80, 2039, 312, "A800", native=160e9, host=24e9, slices=7),
    _row("h20", "nvidia", 96, 4000, 148, "H20", nic=50e9, slices=7),
    _row("h100", "nvidia", 80, 3350, 989, "H100", published=440, nic=50e9, slices=7),
    _row("h800", "nvidia", 80, 3350, 989, "H800", nic=50e9, native=160e9, slices=7),
    _row("h200", "nvidia", 141, 4800, 989, "H200", published=549.7, nic=50e9, slices=7),
    _row("gh200", "nvidia", 96, 4000, 989, "GH200", nic=50e9, slices=7),
    _row("b200", "nvidia", 180, 8000, 2250, "B200", nic=50e9, native=600e9, slices=7),
    _row("gb200", "nvidia", 186, 8000, 2500, "GB200", nic=50e9, native=600e9, host=200e9, slices=7),
    _row("b300", "nvidia", 270, 8000, 2250, "B300", nic=100e9, native=600e9, slices=7),
    _row("mi100", "amd", 32, 1228, 92, "MI100", native=80e9, host=24e9),
    _row("mi210", "amd", 64, 1638, 181, "MI210", native=80e9, host=24e9),
    _row("mi250x", "amd", 64, 1638, 191, "MI250X", "MI250", native=100e9, host=24e9),  # one of the package's two dies
    _row("mi300a", "amd", 128, 5300, 980, "MI300A", chiplets=6),
    _row("mi300x", "amd", 192, 5300, 1307, "MI300X", nic=50e9, chiplets=8),
    _row("mi308x", "amd", 192, 5300, 390, "MI308X", nic=50e9, chiplets=4),
    _row("mi325x", "amd", 256, 6000, 1307, "MI325X", published=534.9, nic=50e9, chiplets=8),
    _row("mi350x", "amd", 288, 8000, 2300, "MI350X", nic=50e9, chiplets=8),
    _row("mi355x", "amd", 288, 8000, 2500, "MI355X", nic=50e9, chiplets=8),
    _row("max1100", "intel", 48, 1229, 352, "Data Center GPU Max 1100", native=24e9, host=25e9),
    DeviceClass("cpu", "cpu", 4 * GiB, 20e9, 0.0, 0.05, 1.25e9, 4e9, 10e9, launch_s=300e-6, runtime_bytes=GiB // 4),
)
_FP32_FP64 = {  # the vendors' dense peaks: of the vector units, or of AMD's and the A100's and H100's fp64 matrix units
    "p100": (10.6, 5.3),
    "v100": (15.7, 7.8),
    "v100s": (16.4, 8.2),
    "t4": (8.1, 0.25),
    "rtx2080ti": (13.4, 0.42),
    "titanrtx": (16.3, 0.51),
    "a30": (10.3, 10.3),
    "a40": (37.4, 0.58),
    "a10": (31.2, 0.49),
    "a10g": (31.5, 0.49),
    "l4": (30.3, 0.47),
    "l20": (59.8, 0.93),
    "l40": (90.5, 1.41),
    "l40s": (91.6, 1.43),
    "rtx3080": (29.8, 0.47),
    "rtx3090": (35.6, 0.56),
    "rtx4090": (82.6, 1.29),
    "rtx5090": (104.8, 1.64),
    "a5000": (27.8, 0.43),
    "a6000": (38.7, 0.6),
    "rtx6000ada": (91.1, 1.42),
    "a100-40g": (19.5, 19.5),
    "a100": (19.5, 19.5),
    "a800": (19.5, 9.7),
    "h20": (44, 1),
    "h100": (67, 67),
    "h800": (67, 1),
    "h200": (67, 67),
    "gh200": (67, 67),
    "mi100": (46.1, 11.5),
    "mi210": (45.3, 45.3),
    "mi250x": (47.9, 47.9),
    "mi300a": (122.6, 122.6),
    "mi300x": (163.4, 163.4),
    "mi325x": (163.4, 163.4),
    "mi350x": (144.2, 72.1),
    "mi355x": (157.3, 78.6),
}
_WITHOUT_BF16 = ("p100", "v100", "v100s", "t4", "rtx2080ti", "titanrtx")


def _with_precisions(row: DeviceClass) -> DeviceClass:
    fp32, fp64 = (peak and float(peak) for peak in _FP32_FP64.get(row.name, (None, None)))
    bf16 = row.name not in _WITHOUT_BF16
    tf32 = bf16 and row.vendor == "nvidia"  # of AMD's, CDNA3 has a like (XF32) that torch does not take
    return replace(row, bf16=bf16, tf32=tf32, fp32_tflops=fp32, fp64_tflops=fp64)


CLASSES = Hardware({row.name: _with_precisions(row) for row in _ROWS})
