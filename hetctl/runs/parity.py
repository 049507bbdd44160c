"""Whether the first losses of a run are those of one process, which made these steps beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.launcher.run_folder.records import Parity

ROUNDING = {"fp64": 1e-10, "fp32": 2e-5}  # relative, of a loss after a few steps
COARSE = 1e-2  # of products in 8 to 11 bits: bf16, fp16, TF32


def held_against(losses: Sequence[float | None], wanted: Sequence[float | None], precision: str) -> Parity:
    """The first losses of a run beside those of one process, of which there is at least one."""
    whole = len(losses) == len(wanted) and None not in losses and None not in wanted
    apart = max((abs((a or 0) - (b or 0)) for a, b in zip(losses, wanted, strict=False)), default=0.0)
    allowed = ROUNDING.get(precision, COARSE) * max((abs(loss or 0) for loss in wanted), default=0.0)
    return Parity(len(wanted), apart if whole else None, allowed, precision, equal=whole and apart <= allowed)
