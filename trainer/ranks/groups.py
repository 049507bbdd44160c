"""Where a rank stands in the plan, and the plan's process groups: every rank creates all, in the plan's order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan

DIRECTIONS = ("forward", "backward")


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


@dataclass
class ProcessGroups:
    """Groups by the set of their ranks; a pipeline boundary has one group per direction.

    Two directions, because a native library runs a group's transfers in order: a forward and a backward
    transfer that wait for each other's turn would deadlock on one group.
    """

    reducing: dict[frozenset[int], dist.ProcessGroup] = field(default_factory=dict)
    boundaries: dict[tuple[int, int, str], dist.ProcessGroup] = field(default_factory=dict)

    def reduce_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group that sums over exactly these ranks. Raises ConfigError when the plan has none."""
        return _known(self.reducing.get(frozenset(ranks)), ranks)

    def destroy(self) -> None:
        """End all of them; every rank does so at the same point."""
        for group in (*self.reducing.values(), *self.boundaries.values()):
            if isinstance(group, dist.ProcessGroup):  # others hold a place for groups that this rank is not in
                dist.destroy_process_group(group)
        self.reducing, self.boundaries = {}, {}

    def boundary(self, plan: Plan, replica: int, edge: int, direction: str) -> dist.ProcessGroup:
        """The group between stages `edge` and `edge` + 1 of a replica for 'forward' or 'backward'."""
        stages = plan.replicas[replica].stages
        ranks = stages[edge].ranks + stages[edge + 1].ranks
        return _known(self.boundaries.get((replica, edge, direction)), ranks)


def create_groups(plan: Plan, *, timeout: timedelta, backend: str = "het") -> ProcessGroups:
    """All groups of the plan; `het` hands out the native group wherever a group stays in one island."""
    groups = ProcessGroups()

    def new(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
        return group

    edges = _edges(plan)
    for planned in plan.groups:
        key = frozenset(planned.ranks)
        if planned.kind == "pipeline":
            where = edges[key].popleft() if edges.get(key) else None
            for direction in DIRECTIONS:
                made = new(planned.ranks, f"{planned.name}-{direction}")
                if where is not None:
                    groups.boundaries[(*where, direction)] = made
        elif key not in groups.reducing:
            groups.reducing[key] = new(planned.ranks, planned.name)
    return groups


def _edges(plan: Plan) -> dict[frozenset[int], deque[tuple[int, int]]]:
    """Ranks of a boundary -> its replica and first stage; several where devices hold several stages."""
    found: dict[frozenset[int], deque[tuple[int, int]]] = {}
    for number, replica in enumerate(plan.replicas):
        for edge, (a, b) in enumerate(pairwise(replica.stages)):
            found.setdefault(frozenset(a.ranks + b.ranks), deque()).append((number, edge))
    return found


def _known(group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if group is None:
        raise ConfigError(f"the plan has no group for ranks {list(ranks)}", hint="make the plan anew: hetctl plan")
    return group
