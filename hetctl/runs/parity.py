"""Whether the first losses of a run are those of one process, which made these steps beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = {"fp64": 1e-10, "fp32": 2e-5}  # relative, of a loss after a few steps
COARSE = 1e-2  # of products in 8 to 11 bits: bf16, fp16, TF32


@dataclass(frozen=True)
class Parity:
    """How far the first losses of a run are from those of one process, and how far rounding can take them."""

    steps: int
    worst_deviation: float | None  # None: a loss is missing or not finite
    allowed: float
    precision: str
    equal: bool


def held_against(losses: Sequence[float | None], wanted: Sequence[float | None], precision: str) -> Parity:
    """The first losses of a run beside those of one process, of which there is at least one."""
    whole = len(losses) == len(wanted) and None not in losses and None not in wanted
    apart = max((abs((a or 0) - (b or 0)) for a, b in zip(losses, wanted, strict=False)), default=0.0)
    allowed = ROUNDING.get(precision, COARSE) * max((abs(loss or 0) for loss in wanted), default=0.0)
    return Parity(len(wanted), apart if whole else None, allowed, precision, equal=whole and apart <= allowed)
