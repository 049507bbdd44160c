"""Shapes to measure so that others follow (`planning/over_shapes.py`): sizes and lengths as models have them.

Between them they span what is trained; no two sizes grow together, or nobody could tell their seconds apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hetctl.comm.operation.device import has_streams
from hetctl.trainer.bench.ops import measure_class
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.planning.profile import ClassProfile

WARM_S = 0.3  # of work before each: what was measured just before has kept the device warm


@dataclass(frozen=True)
class ShapeToMeasure:
    """A model's layers at a length, for so many samples a micro-batch."""

    shape: ModelShape
    seq_len: int
    samples: tuple[int, ...] = (1, 4)

    @property
    def name(self) -> str:
        return f"{self.shape.name} at {self.seq_len} tokens"


def _of(name: str, seq_len: int, *samples: int) -> ShapeToMeasure:
    return ShapeToMeasure(replace(SHAPES[name], layers=4), seq_len, samples or (1, 4))  # two blocks are timed in a row


def _small(seq_len: int, hidden: int, heads: int, kv: int, intermediate: int, vocab: int) -> ShapeToMeasure:
    name = f"llama-{hidden}-{intermediate}-{vocab}"
    shape = ModelShape(name, "llama", 4, hidden, heads, kv, intermediate, vocab)
    return ShapeToMeasure(shape, seq_len, (1, 4) if seq_len < 1024 else (1, 2))


ON_ACCELERATORS = (
    _of("llama-160m", 1024),
    _of("llama-1b", 2048),
    _of("llama-1b-untied", 8192),
    _of("llama-3b", 4096),
    _of("llama2-7b", 2048),
    _of("llama-8b", 4096),
    _of("qwen2-7b", 16384, 1, 2),
    _of("llama-70b", 4096, 1, 2),
)
ON_CPUS = (  # a CPU process trains models of a few millions
    _small(64, 64, 2, 2, 256, 257),
    _small(1024, 64, 4, 1, 176, 2048),
    _small(128, 128, 4, 2, 352, 257),
    _small(512, 128, 4, 4, 512, 1024),
    _small(64, 256, 8, 2, 704, 4096),
    _small(256, 256, 4, 4, 1024, 1024),
)


def measure_shapes(
    wanted: Sequence[ShapeToMeasure], device_class: str, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[ShapeToMeasure, ClassProfile | None]]:
    """Each shape and what was measured of it; None where not even one sample fits on the device."""
    update_s: float | None = None
    for row in wanted:
        try:
            entry = measure_class(
                row.shape,
                row.seq_len,
                device_class=device_class,
                device=device,
                dtype=dtype,
                samples=row.samples,
                warm_s=WARM_S,
                update_s=update_s,
            )
        except torch.OutOfMemoryError:
            yield row, None
            continue
        update_s = entry.update_s
        yield row, entry


def grid(device: torch.device) -> tuple[ShapeToMeasure, ...]:
    """What is measured of a device of this type."""
    return ON_ACCELERATORS if has_streams(device) else ON_CPUS
