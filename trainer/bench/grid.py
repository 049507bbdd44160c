"""Shapes to measure so that others follow (`planning/over_shapes.py`): sizes and lengths as models have them.

Between them they span what is trained; no two sizes grow together, or nobody could tell their seconds apart. No torch:
what one rank is asked to measure is written where it is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.natives import HOST
from hetctl.trainer.model.shapes import SHAPES, ModelShape


@dataclass(frozen=True)
class ShapeToMeasure:
    """A model's layers at a length, for so many samples a micro-batch."""

    shape: ModelShape
    seq_len: int
    samples: tuple[int, ...] = (1, 4)

    @property
    def name(self) -> str:
        return f"{self.shape.name} at {self.seq_len} tokens"


@dataclass(frozen=True)
class ClassToMeasure:
    """What one rank measures of its device. `processes` share the cores of its host when it trains.

    Of a `tensor` group all ranks of the job measure their parts, and the first one tells.
    """

    device_class: str
    shapes: tuple[ShapeToMeasure, ...]
    processes: int = 1
    precision: Precision | None = None  # None: bf16 on a GPU, fp32 on a CPU
    tensor: int = 1


def _of(name: str, seq_len: int, *samples: int) -> ShapeToMeasure:
    return ShapeToMeasure(replace(SHAPES[name], layers=4), seq_len, samples or (1, 4))  # two blocks are timed in a row


def _small(seq_len: int, hidden: int, heads: int, kv: int, intermediate: int, vocab: int) -> ShapeToMeasure:
    name = f"llama-{hidden}-{intermediate}-{vocab}"
    shape = ModelShape(name, "llama", 4, hidden, heads, kv, intermediate, vocab)
    return ShapeToMeasure(shape, seq_len, (1, 4) if seq_len < 1024 else (1, 2))


ON_ACCELERATORS = (
    _of("llama-160m", 1024, 1, 8),
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


def grid(device_type: str) -> tuple[ShapeToMeasure, ...]:
    """What is measured of a device of this type."""
    return ON_CPUS if device_type == HOST else ON_ACCELERATORS
