"""Device classes as the hardware table has them."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.hardware import CLASSES

HEAD = """# Device classes

What hetctl knows of accelerators, made from `trainer/planning/devices.yaml`: `make reference`. Yours may differ, or be
missing: [hardware.md](hardware.md) says how a class is corrected and added.

TFLOPS are the vendors' dense peaks; data sheets of NVIDIA print twice that, with sparsity. 16 bits is bf16, and fp16 as
fast unless it is given; "fp16" alone: it does not multiply bf16, and all of a cluster with it computes in fp16. Of
GeForce they are with fp32 accumulation, which training uses, and which there is half as fast as with fp16. TF32, where
it is, is half of bf16. fp8 is recorded, not yet planned in. "trains" is what training sustains at 16 bits: published
figures are bold, others are the share of the peak that a like class sustains, 45 % where none is known.

A device is recognised by its PCI vendor:device id, then by any name that its tools give; of products that share an id,
the names decide, else the slower is taken. A product of no row is trained on with a cautious estimate, which
`hetctl discover` and `hetctl plan` say: half of the slowest class of its architecture, and less in proportion where it
has less memory.
"""


def made() -> str:
    """The page as the table would have it."""
    rows = [row for row in CLASSES.values() if row.vendor != "cpu"]
    return HEAD + "".join(
        _section(v, [r for r in rows if r.vendor == v]) for v in dict.fromkeys(r.vendor for r in rows)
    )


def _section(vendor: str, rows: list[DeviceClass]) -> str:
    head = "| class | memory | GB/s | 16 bits | fp8 | fp32 | fp64 | trains | names | ids | source |\n"
    return f"\n## {vendor}\n\n{head}|{'---|' * 11}\n" + "".join(map(_line, rows))


def _line(row: DeviceClass) -> str:
    title, _, address = row.source.partition(", https://")
    sixteen = f"{row.peak_tflops:g}" + ("" if row.bf16 else " fp16")
    sixteen += f", fp16 {row.fp16_tflops:g}" if row.fp16_tflops else ""
    trains = f"**{row.published_tflops:g}**" if row.published_tflops else f"{row.sustained_tflops:.3g}"
    cells: Iterable[str] = (
        f"`{row.name}`",
        f"{row.memory_bytes / GiB:g} GiB",
        f"{row.memory_bytes_per_s / 1e9:g}",
        sixteen,
        *(f"{peak:g}" if peak else "" for peak in (row.fp8_tflops, row.fp32_tflops, row.fp64_tflops)),
        trains,
        ", ".join(row.product_names),
        ", ".join(row.ids),
        f"[{title}](https://{address})" if address else title,
    )
    return f"| {' | '.join(cells)} |\n"
