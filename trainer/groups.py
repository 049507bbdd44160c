"""The plan's process groups as torch.distributed groups. Every rank creates every group, in the plan's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from hetctl.comm.errors import ConfigError
from hetctl.comm.plan import Plan

DIRECTIONS = ("forward", "backward")


@dataclass
class ProcessGroups:
    """Groups by the set of their ranks; a pipeline boundary has one group per direction.

    Two directions, because a native library runs a group's transfers in order: a forward and a backward
    transfer that wait for each other's turn would deadlock on one group.
    """

    reducing: dict[frozenset[int], dist.ProcessGroup] = field(default_factory=dict)
    boundaries: dict[tuple[frozenset[int], str], dist.ProcessGroup] = field(default_factory=dict)

    def reduce_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group that sums over exactly these ranks. Raises ConfigError when the plan has none."""
        return _known(self.reducing.get(frozenset(ranks)), ranks)

    def boundary(self, ranks: tuple[int, ...], direction: str) -> dist.ProcessGroup:
        """The group of a stage boundary (both stages' ranks) for 'forward' or 'backward'."""
        return _known(self.boundaries.get((frozenset(ranks), direction)), ranks)


def create_groups(plan: Plan, *, timeout: timedelta, backend: str = "het") -> ProcessGroups:
    """All groups of the plan; `het` hands out the native group wherever a group stays in one island."""
    groups = ProcessGroups()

    def new(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
        return group

    for planned in plan.groups:
        key = frozenset(planned.ranks)
        if planned.kind == "pipeline":
            for direction in DIRECTIONS:
                groups.boundaries[key, direction] = new(planned.ranks, f"{planned.name}-{direction}")
        elif key not in groups.reducing:
            groups.reducing[key] = new(planned.ranks, planned.name)
    return groups


def _known(group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if group is None:
        raise ConfigError(f"the plan has no group for ranks {list(ranks)}", hint="make the plan anew: hetctl plan")
    return group
