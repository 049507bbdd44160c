"""Low-rank adapters (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353): which projections have them, which parameters
are theirs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.trainer.model.block_formats import Quantised

DOWN, UP = "lora_A", "lora_B"  # PEFT's names: [rank, values in] and [values out, rank]
MAGNITUDE = "lora_magnitude_vector"  # of DoRA: [values out]


@dataclass(frozen=True)
class Adapters:
    """What is trained while the model's own weights stay as they are: `x (W + scale * B A)^T` in place of `x W^T`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of projections, in every block
    dora: bool = False  # rows of the sum keep a trained magnitude: each is divided by its norm, which has no gradient
    dropout: float = 0.0  # the share of what an adapter reads that training leaves out
    quantised: Quantised | None = None  # how the own weights of all projections are kept; None: as they are

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def parts_of(self, module: str) -> tuple[str, ...]:
        """The parameters of a projection's adapter."""
        factors = (f"{module}.{DOWN}.weight", f"{module}.{UP}.weight")
        return (*factors, f"{module}.{MAGNITUDE}") if self.dora else factors


def is_trained(name: str, adapters: Adapters | None) -> bool:
    """Whether training changes the parameter with this name."""
    return adapters is None or f".{DOWN}." in name or f".{UP}." in name or name.endswith(MAGNITUDE)
