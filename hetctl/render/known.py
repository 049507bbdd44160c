"""Models and device classes that are known by name, as rows and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from hetctl.comm.contract.units import show_bytes
from hetctl.trainer.families.registry import trained_families
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.hardware import CLASSES


def model_rows() -> list[dict[str, Any]]:
    """Each known shape by its name, the small ones first; `trains`: false where it can be planned only."""
    trained = {family.model_type for family in trained_families()}
    rows = [
        {
            "name": name,
            "family": shape.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "vocab": shape.vocab,
            "max_seq_len": shape.max_seq_len,
            "trains": shape.family in trained,
        }
        for name, shape in SHAPES.items()
    ]
    return sorted(rows, key=lambda row: row["parameters"])


def model_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a model."""
    table = Table("model", "family", *_right("parameters", "layers", "hidden", "longest sample"), "", box=None)
    for row in rows:
        sizes = (
            count_of_parameters(row["parameters"]),
            str(row["layers"]),
            str(row["hidden"]),
            f"{row['max_seq_len']:,}",
        )
        table.add_row(row["name"], row["family"], *sizes, "" if row["trains"] else "plan only")
    return table


def device_rows() -> list[dict[str, Any]]:
    """Each class of the hardware table; what is unknown of it is None."""
    return [
        {
            "name": row.name,
            "vendor": row.vendor,
            "memory_bytes": row.memory_bytes,
            "memory_bytes_per_s": row.memory_bytes_per_s,
            "peak_tflops": row.peak_tflops or None,
            "bf16": row.bf16,
            "sustained_tflops": row.sustained_tflops,
            "published": row.published_tflops is not None,
            "price_per_hour": row.price_per_hour,
            "source": row.source or None,
        }
        for row in CLASSES.values()
    ]


def device_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a class: memory, the dense 16-bit peak, and what training is assumed to sustain of it."""
    heads = _right("memory", "GB/s", "peak TFLOPS", "sustained")
    table = Table("class", "vendor", *heads, box=None, caption="* published; others 45 % of the peak")
    for row in rows:
        table.add_row(
            row["name"],
            row["vendor"],
            show_bytes(row["memory_bytes"]),
            f"{row['memory_bytes_per_s'] / 1e9:,.0f}",
            f"{row['peak_tflops']:.4g}" if row["peak_tflops"] else "-",
            f"{row['sustained_tflops']:.3g}{'*' if row['published'] else ' '}",
        )
    return table


def _right(*heads: str) -> list[Column]:
    return [Column(head, justify="right") for head in heads]


def count_of_parameters(parameters: int) -> str:
    """Parameters as models are named: 1.1 M, 8.03 B."""
    power, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / power:.3g} {letter}"
