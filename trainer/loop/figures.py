"""What a step came to, and where each island's time and memory go: figures that all ranks sum once a step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import has_streams, peak_device_memory
from hetctl.trainer.ranks.timeline import Span, StepTimes, step_times

REPORT_S = 1.0  # for a person who looks on: memory is read, and islands are reported, no more often
TIMES = tuple(f.name for f in fields(StepTimes))
WIDTH = len(TIMES) + 1  # elements of an island in the sum


@dataclass(frozen=True)
class Means:
    """What samples came to, by the pipeline's sums over all ranks."""

    loss: float  # mean over all valid tokens, or over all preference pairs
    tokens: int
    pairs: int | None = None
    accuracy: float | None = None  # the share of pairs whose chosen answer is preferred
    margin: float | None = None  # mean of what the sigmoid of DPO is taken of

    @classmethod
    def of(cls, sums: Sequence[float]) -> Means | None:
        """None where there is no loss."""
        loss, tokens, *of_pairs = sums
        pairs, right, margins = of_pairs or (None, 0.0, 0.0)
        if not (terms := tokens if pairs is None else pairs):
            return None
        if pairs is None:
            return cls(loss / terms, int(tokens))
        return cls(loss / terms, int(tokens), int(pairs), right / pairs, margins / pairs)

    @property
    def preferred(self) -> dict[str, float]:
        """How pairs did in a validation, for its report."""
        if self.accuracy is None or self.margin is None:
            return {}
        return {"validation_accuracy": self.accuracy, "validation_margin": self.margin}

    @property
    def terms(self) -> int:
        """Of the loss, which is their mean."""
        return self.tokens if self.pairs is None else self.pairs


@dataclass(frozen=True)
class StepFigures(Means):
    """What a step came to, equal on all ranks."""

    grad_norm: float = 0.0  # before clipping
    lr: float = 0.0
    loss_scale: float | None = None  # of fp16

    @property
    def finite(self) -> bool:
        """Whether the weights were updated: others are skipped, where they do not stop the run."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether a smaller loss scale may be all that is needed."""
        return self.loss_scale is not None and math.isfinite(self.loss) and not self.finite


@dataclass
class SoFar:
    """What this attempt's steps came to: no more to hold after a million of them than after one."""

    steps: int = 0
    tokens: int = 0
    first: StepFigures | None = None
    latest: StepFigures | None = None

    def add(self, figures: StepFigures) -> None:
        """One more step."""
        self.steps, self.tokens = self.steps + 1, self.tokens + figures.tokens
        self.first, self.latest = self.first or figures, figures


class IslandFigures:
    """Where each island's time and memory go: one vector, summed with the step's figures, so that nobody waits more.

    An island has an element for each of `StepTimes` and one for how many of its ranks know theirs. Each rank has one
    for its memory, because a sum knows no largest.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.islands, self.device = plan.islands, device
        self.sums: Sequence[float] = ()  # over all ranks, as of the latest step
        self._addend = torch.zeros(WIDTH * len(plan.islands) + plan.world_size, dtype=torch.float64, device="cpu")
        first = WIDTH * next(n for n, island in enumerate(plan.islands) if rank in island.ranks)
        self._times = self._addend[first : first + WIDTH]
        self._memory = self._addend[rank - plan.world_size :][:1]
        self._read_at = self._reported_at = -REPORT_S

    def addend(self, spans: Sequence[Span] | None) -> torch.Tensor:
        """What this rank adds: where its latest step went, if it knows, and its memory."""
        if spans:
            known = [*asdict(step_times(spans)).values(), 1.0]
            self._times.copy_(torch.tensor(known, dtype=torch.float64, device="cpu"))
        if (now := time.monotonic()) - self._read_at >= REPORT_S:
            self._read_at = now
            self._memory.fill_(peak_memory(self.device))
        return self._addend.pin_memory() if has_streams(self.device) else self._addend

    def report(self) -> dict[str, Any]:
        """By island the mean seconds of its ranks and the most memory on any, for metrics; nothing too soon again."""
        if not self.sums or (now := time.monotonic()) - self._reported_at < REPORT_S:
            return {}
        found = {}
        for number, island in enumerate(self.islands):
            *seconds, knowing = self.sums[WIDTH * number : WIDTH * (number + 1)]
            if knowing:
                memory = max(self.sums[WIDTH * len(self.islands) + rank] for rank in island.ranks)
                means = {f"{name}_s": total / knowing for name, total in zip(TIMES, seconds, strict=True)}
                found[island.name] = {**means, "memory_bytes": int(memory)}
        if found:
            self._reported_at = now
        return {"islands": found} if found else {}


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank has held so far: on its device, or of its process."""
    import resource

    held = peak_device_memory(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if held is None else held
