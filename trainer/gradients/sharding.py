"""With whom a rank shares what: the state of its stage, and (tensor groups) the computation of its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetctl.comm.contract.plan import Plan
from hetctl.trainer.gradients.layout import BucketLayout
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare
from hetctl.trainer.planning.state_sharding import Asked, has_room, more_bytes
from hetctl.trainer.ranks.groups import Place, ProcessGroups


@dataclass(frozen=True)
class Shards:
    """Which part of every bucket's state this rank keeps, and with whom it forms the whole."""

    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: alone
    copy: tuple[int, ...] = ()  # all ranks that together hold this copy of the stage: the tensor groups of `ranks`

    @property
    def count(self) -> int:
        return len(self.ranks)


def shards_of(plan: Plan, place: Place, groups: ProcessGroups) -> Shards:
    """With whom a rank shares the state of its stage: runs of `shards` neighbours in the stage's order."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree, first = stage.tensor_parallel, place.part // stage.shards * stage.shards
    copy = stage.ranks[first * degree : (first + stage.shards) * degree]
    ranks = copy[place.tensor :: degree]
    return Shards(place.part - first, ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None, copy)


def shards_over(layout: BucketLayout, rank: int, groups: ProcessGroups) -> Shards:
    """The same with all holders of a bucket, in the order of their group: each keeps the state of an equal part."""
    ranks = tuple(sorted(layout.holders))
    return Shards(ranks.index(rank), ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None)


def may_share(plan: Plan, layout: BucketLayout) -> bool:
    """Whether all holders of a bucket can share out its state: the same answer on each of them.

    They cut parameters alike, and the ranks of a tensor group, who add up what several of them hold, keep like parts.
    """
    if layout.mixed:
        return False
    groups = next(g for g in (*(s.groups for s in plan.segments), plan.tied_groups()) if layout.holders in g)
    part = {rank: index for group in groups for index, rank in enumerate(sorted(group))}
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    together = (s.ranks[k : k + s.tensor_parallel] for s in stages for k in range(0, len(s.ranks), s.tensor_parallel))
    return all(len({part[r] for r in ranks if r in part}) <= 1 for ranks in together)


def tensor_share_of(plan: Plan, place: Place, groups: ProcessGroups) -> TensorShare:
    """A rank's place in the tensor group that computes its share of the samples."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree = stage.tensor_parallel
    if degree == 1:
        return ALONE
    ranks = stage.ranks[place.part * degree : (place.part + 1) * degree]
    return TensorShare(degree, place.tensor, groups.reduce_group(ranks))


def keeps_whole(plan: Plan, place: Place, asked: Asked, *, parameters: int, dtype: torch.dtype) -> bool:
    """Whether a sharded stage shares out optimiser state only: as recipe or plan say, or if all of it fits so."""
    stage = plan.replicas[place.replica].stages[place.stage]
    if asked != "auto" or stage.shards == 1:
        return asked != "all"
    if stage.whole is not None or plan.predicted is None:
        return stage.whole is not False
    each = dtype.itemsize + max(dtype.itemsize, 4)  # weights as they are computed with, and a gradient
    more, predicted = more_bytes(parameters, stage.shards, each), plan.predicted.memory_bytes
    return all(has_room(predicted[r], more, plan.ranks[r].memory_bytes) for r in stage.ranks)
