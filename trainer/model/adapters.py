"""Low-rank adapters (LoRA, arXiv 2106.09685): which projections have them, which parameters are theirs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

DOWN, UP = "lora_A", "lora_B"  # PEFT's names: [rank, values in] and [values out, rank]


@dataclass(frozen=True)
class Adapters:
    """What is trained while the model's own weights stay as they are: `x (W + scale * B A)^T` in place of `x W^T`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of projections, in every block

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_trained(name: str, adapters: Adapters | None) -> bool:
    """Whether training changes the parameter with this name."""
    return adapters is None or f".{DOWN}." in name or f".{UP}." in name
