"""Layers by measured speeds: where each pipeline's cuts would be better, for what ranks were seen to need.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np

from hetctl.comm.contract.plan import Plan, PlannedGroup, Replica, segment_of, segments_of, summing_groups
from hetctl.trainer.adapt.pace import Paces
from hetctl.trainer.planning.partition import StageTable, best_split, fixed_split
from hetctl.trainer.recipe import Recipe

WORTH = 0.05  # relative gain for which the layers move: ranks build their models anew, and compile them again


def why_uncut(plan: Plan, recipe: Recipe) -> str:
    """Why layers cannot follow speeds in this plan; empty where they can."""
    if recipe.parallelism.layers is not None or recipe.parallelism.split != "auto":
        return "the recipe says which layers stages take"
    if all(len(r.stages) == 1 for r in plan.replicas):
        return "no replica is cut into stages"
    if any(len(r.stages) > 1 for r in plan.ranks):
        return "interleaved stages share devices"
    if any(plan.cost(number, s) is None for number, r in enumerate(plan.replicas) for s in range(len(r.stages))):
        return "the plan does not say what its stages cost: make it anew"
    return ""


def resplit(plan: Plan, paces: Paces, *, tied: bool) -> Plan | None:
    """The plan with its layers cut by measured speeds; None where that gains too little. Needs `why_uncut` to be empty.

    A stage's seconds are its slowest rank's, and change with its layers as the plan predicts, in proportion. A stage
    grows only as far as the plan says that it certainly fits. `tied`: the first and the last stage share an embedding.
    """
    before, after, layers = 0.0, 0.0, list[Sequence[int]]()
    for number, replica in enumerate(plan.replicas):
        tables, count = _tables(plan, number, paces), replica.stages[0].micro_batches
        now = fixed_split(tables, [stage.depth for stage in replica.stages], micro_batches=count)
        best = best_split(tables, plan.layer_count, micro_batches=count)
        if now is None or best is None:
            return None
        before, after = max(before, now.seconds), max(after, best.seconds)
        layers.append(best.layers)
    if after > before * (1 - WORTH):
        return None
    return _joined(with_layers(plan, layers), tied=tied)


def with_layers(plan: Plan, layers: Sequence[Sequence[int]]) -> Plan:
    """The plan with so many layers on each replica's stages; its groups stay as they were."""
    replicas = tuple(_cut(replica, each) for replica, each in zip(plan.replicas, layers, strict=True))
    return replace(plan, replicas=replicas, segments=tuple(segment_of(replicas, s) for s in segments_of(replicas)))


def _tables(plan: Plan, number: int, paces: Paces) -> list[StageTable]:
    """Seconds of a micro-batch for every number of layers of each stage; infinity where memory may not do."""
    counts, found = np.arange(plan.layer_count + 1, dtype=np.float64), []
    for index, stage in enumerate(plan.replicas[number].stages):
        cost = plan.cost(number, index)
        assert cost is not None
        slowed = max(paces[r] for r in stage.ranks) / cost.compute_at(stage.depth)
        beat = slowed * (cost.compute_s + (counts - cost.layers) * cost.block_s)
        beat[counts > max(stage.depth, cost.most_layers)] = np.inf
        found.append(StageTable(beat[np.newaxis], np.zeros((1, len(counts)))))
    return found


def _joined(plan: Plan, *, tied: bool) -> Plan | None:
    """A plan with the groups that its segments need; None where islands would have to talk that do not so far."""
    inside = [g for g in plan.groups if g.kind in ("data", "tensor")]
    holders = plan.tied_groups() if tied else ()
    sums = summing_groups(plan.replicas, plan.segments, tied=holders, held=inside)
    kept = tuple(g for g in plan.groups if g.kind != "segment")
    groups = (*kept, *(_group(plan, name, ranks) for name, ranks in sums))
    ways = {frozenset(b.islands) for b in plan.bridges}
    for group in groups:
        names = dict.fromkeys(plan.island_of_rank[r].name for r in group.ranks)
        if any(frozenset(pair) not in ways for pair in combinations(names, 2)):
            return None
    return replace(plan, groups=groups)


def _group(plan: Plan, name: str, ranks: tuple[int, ...]) -> PlannedGroup:
    """A group that sums: the bridge's across islands, otherwise what runs such groups of that island already."""
    bridged = PlannedGroup(name, "segment", ranks, "het")
    if plan.crosses_islands(ranks):
        return bridged
    island = plan.island_of_rank[ranks[0]]
    like = (g for g in plan.groups if set(g.ranks) <= set(island.ranks) and g.backend != "het")
    return replace(next(like, bridged), name=name, kind="segment", ranks=ranks)


def _cut(replica: Replica, layers: Sequence[int]) -> Replica:
    spans = pairwise(accumulate((0, *layers)))
    return replace(
        replica, stages=tuple(replace(s, layers=span) for s, span in zip(replica.stages, spans, strict=True))
    )
