"""What measured speeds say of a plan: who is slower than its like, and how counts would follow the speeds. No torch."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetctl.comm.plan import Plan, Replica, Stage

SLOW = 1.2  # times the typical pace of its like: noise is below
WORTH = 0.02  # relative gain for which counts are changed

Paces = Mapping[int, float]  # rank -> seconds of computing per micro-batch


@dataclass(frozen=True)
class Straggler:
    """A rank that computes much more slowly than ranks which do the same on the same kind of device."""

    rank: int
    host: str
    device_class: str
    ratio: float  # its time over its like's

    @property
    def sentence(self) -> str:
        return (
            f"rank {self.rank} ({self.device_class} on {self.host}) takes {self.ratio:.2f} times as long as ranks "
            "that do the same: `hetctl doctor` on its host may say why"
        )


def stragglers(plan: Plan, paces: Paces) -> list[Straggler]:
    """Ranks much slower than their like, slowest first; a rank that is the only one of its kind is never one."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in paces:
        alike.setdefault(_work(plan, rank), []).append(rank)
    found = []
    for ranks in alike.values():
        for rank in ranks if len(ranks) > 1 else ():
            typical = statistics.median(paces[r] for r in ranks if r != rank)
            if paces[rank] > SLOW * typical > 0:
                placed = plan.ranks[rank]
                found.append(Straggler(rank, placed.host, placed.device_class, paces[rank] / typical))
    return sorted(found, key=lambda s: -s.ratio)


def why_fixed(plan: Plan) -> str:
    """Why accumulation counts cannot follow speeds in this plan; empty where they can."""
    if len(plan.replicas) < 2:
        return "there is one replica: nothing to share out anew"
    if len({r.stages[0].micro_batch_size for r in plan.replicas}) > 1:
        return "the replicas' micro-batch sizes differ: counts alone cannot share samples out anew"
    if any(len(r.stages) > 1 for r in plan.ranks):
        return "interleaved schedules need counts in multiples of their devices"
    return ""


def rebalanced(plan: Plan, paces: Paces) -> Plan | None:
    """The plan with counts by measured speeds; None where that gains too little. Needs `why_fixed` to be empty.

    A replica of p stages takes (m + p - 1) turns of its slowest rank. Each further micro-batch goes to whoever would
    be done first with it, which makes the slowest as fast as whole micro-batches allow.
    """
    turns = [max(paces[r] for s in replica.stages for r in s.ranks) for replica in plan.replicas]
    depths = [len(replica.stages) for replica in plan.replicas]
    counts = [replica.stages[0].micro_batches for replica in plan.replicas]
    chosen = _shared(sum(counts), turns, depths)
    before, after = (_slowest(c, turns, depths) for c in (counts, chosen))
    if after > before * (1 - WORTH):
        return None
    replicas = tuple(_with_count(r, count) for r, count in zip(plan.replicas, chosen, strict=True))
    return replace(plan, replicas=replicas)


def _shared(total: int, turns: Sequence[float], depths: Sequence[int]) -> list[int]:
    counts = [1] * len(turns)
    queue = [((1 + depth) * turn, index) for index, (turn, depth) in enumerate(zip(turns, depths, strict=True))]
    heapq.heapify(queue)
    for _ in range(total - len(turns)):
        _, index = heapq.heappop(queue)
        counts[index] += 1
        heapq.heappush(queue, ((counts[index] + depths[index]) * turns[index], index))
    return counts


def _slowest(counts: Sequence[int], turns: Sequence[float], depths: Sequence[int]) -> float:
    return max((m + p - 1) * t for m, p, t in zip(counts, depths, turns, strict=True))


def _with_count(replica: Replica, count: int) -> Replica:
    return replace(replica, stages=tuple(replace(stage, micro_batches=count) for stage in replica.stages))


def _work(plan: Plan, rank: int) -> tuple[object, ...]:
    """What a rank does per micro-batch, and on what: equal for ranks that should be equally fast."""
    placed = plan.ranks[rank]
    assert placed.replica is not None
    stages = plan.replicas[placed.replica].stages
    return placed.device_class, placed.speed, tuple(_load(plan, stages[s]) for s in placed.stages)


def _load(plan: Plan, stage: Stage) -> tuple[object, ...]:
    first, past = stage.layers
    ends = (first == 0, past == plan.layer_count)
    share = -(-stage.micro_batch_size // stage.width)
    return past - first, ends, share, stage.tensor_parallel, stage.recompute, stage.offload_activations
