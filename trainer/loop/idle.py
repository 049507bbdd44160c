"""A rank that the plan leaves idle: it meets the others where all ranks meet, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetctl.comm.contract.plan import Plan


def is_idle(plan: Plan, rank: int) -> bool:
    """Whether no stage is placed on this rank."""
    return plan.ranks[rank].replica is None


class IdleGradients:
    """No buckets."""

    buckets: tuple[Any, ...] = ()
    parameters: dict[str, Any] = {}  # noqa: RUF012

    def shards(self) -> tuple[Any, ...]:
        return ()

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def squared_norm(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def nothing(self, *_: Any) -> None:
        """What other ranks do to their gradients."""

    begin_step = close = synchronise = scale_ = publish = prepare_update = arrive = nothing


class IdlePipeline:
    """No stage: no loss, no tokens."""

    def train_step(self, batch: Sequence[Any], *, scale: float) -> tuple[Tensor, Tensor]:
        return self.evaluate(batch)

    def evaluate(self, batch: Sequence[Any]) -> tuple[Tensor, Tensor]:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
