"""Pipeline schedules as data: for each stage, the order of its forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]


@dataclass(frozen=True)
class Action:
    """One computation of one stage: forward or backward of a micro-batch."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def in_flight(stages: int, *, schedule: str = "1f1b") -> tuple[int, ...]:
    """Forwards in flight per stage: p - i under 1F1B, 2(p - i) - 1 under eager 1F1B (hides transfers)."""
    if schedule == "eager-1f1b":
        return tuple(2 * (stages - i) - 1 for i in range(stages))
    return tuple(stages - i for i in range(stages))


def stage_actions(micro_batches: int, forwards_ahead: int) -> tuple[Action, ...]:
    """1F1B of one stage: `forwards_ahead` forwards first, then one backward, one forward, until all are done.

    `forwards_ahead` >= `micro_batches` is GPipe. Later stages must run no further ahead than earlier ones.
    """
    if micro_batches < 1 or forwards_ahead < 1:
        raise ValueError("a stage needs at least one micro-batch and one forward in flight")
    warm = min(micro_batches, forwards_ahead)
    actions = [Action("F", k) for k in range(warm)]
    for k in range(micro_batches):
        actions.append(Action("B", k))
        if warm + k < micro_batches:
            actions.append(Action("F", warm + k))
    return tuple(actions)
