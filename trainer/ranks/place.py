"""Where a rank stands in the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetctl.comm.contract.plan import Plan


@dataclass(frozen=True)
class Place:
    """A rank's replica, stage, part of the stage's samples, and part of its layers."""

    rank: int
    replica: int
    stage: int
    part: int  # which of the width's shares
    tensor: int = 0  # which of the tensor group's shares
    stages: tuple[int, ...] = ()  # all it holds, the first of which is `stage`

    @property
    def idle(self) -> bool:
        """Whether no stage is placed on this rank: it meets the others where all ranks meet, and computes nothing."""
        return self.replica < 0

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        placed = plan.ranks[rank]
        if placed.replica is None:
            return Place(rank, replica=-1, stage=-1, part=0)  # idle
        stage = plan.replicas[placed.replica].stages[placed.stages[0]]
        part, tensor = divmod(stage.ranks.index(rank), stage.tensor_parallel)
        return Place(rank, placed.replica, placed.stages[0], part, tensor, placed.stages)

    def at(self, stage: int) -> Place:
        """The same rank as holder of one of its stages."""
        return replace(self, stage=stage)
