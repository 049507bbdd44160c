"""What measured speeds say of a plan: how good they are, who is slower than its like, how counts would follow.

No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hetctl.comm.contract.plan import Plan, Replica, Stage
from hetctl.comm.contract.whole_shares import ended_soonest

SLOW = 1.2  # times the typical pace of its like, or what was predicted: noise is below
UNSURE = 1.5  # times what the hardware table says of unlike work: its errors are below
WORTH = 0.02  # relative gain for which counts are changed

Paces = Mapping[int, float]  # rank -> seconds of computing per micro-batch


@dataclass(frozen=True)
class Straggler:
    """A rank that computes much more slowly than its like, or than was predicted."""

    rank: int
    host: str
    device_class: str
    ratio: float  # its time over the one it is held against
    against: Literal["like", "prediction"] = "like"

    @property
    def sentence(self) -> str:
        beside = {"like": "as long as ranks that do the same", "prediction": "as long as predicted, beside the others"}
        return (
            f"rank {self.rank} ({self.device_class} on {self.host}) takes {self.ratio:.2f} times "
            f"{beside[self.against]}: `hetctl doctor` on its host may say why"
        )


@dataclass(frozen=True)
class Yardstick:
    """What a run's tokens/s are held against; None: unknown."""

    peak_tokens_per_s: float | None  # at an MFU of 1: every device of the plan, used or not, at its peak
    parts_tokens_per_s: float | None  # the sum of what each island's own best plan reaches alone
    basis: str | None = None  # of that sum: predicted from the "table", or from what a profile "measured"

    def figures(self, tokens_per_s: float | None) -> dict[str, float]:
        """MFU and efficiency of so many tokens/s, those that are known."""
        against = {"mfu": self.peak_tokens_per_s, "efficiency": self.parts_tokens_per_s}
        return {name: tokens_per_s / whole for name, whole in against.items() if tokens_per_s and whole}

    def verdict(self, tokens_per_s: float | None) -> dict[str, Any]:
        """The same for a summary, which says None of what is unknown, with what the efficiency rests on."""
        known = self.figures(tokens_per_s)
        efficiency = known.get("efficiency")
        basis = None if efficiency is None else self.basis
        return {"mfu": known.get("mfu"), "efficiency": efficiency, "efficiency_basis": basis}


def yardstick(plan: Plan, cluster_digest: str) -> Yardstick:
    """The plan's own: its prediction turned around, which keeps one definition of both figures.

    A plan that was made for another cluster says nothing of what this one could reach.
    """
    predicted = plan.predicted
    if predicted is None or plan.cluster_digest != cluster_digest:
        return Yardstick(None, None)
    rate, mfu, efficiency = predicted.tokens_per_s, predicted.mfu, predicted.efficiency
    return Yardstick(rate / mfu if mfu else None, rate / efficiency if efficiency else None, predicted.basis)


def stragglers(plan: Plan, paces: Paces) -> list[Straggler]:
    """Ranks much slower than their like, or else than predicted, slowest first."""
    alike = _behind_their_like(plan, paces)
    named = {one.rank for one in alike}
    found = [*alike, *(one for one in _behind_prediction(plan, paces) if one.rank not in named)]
    return sorted(found, key=lambda s: -s.ratio)


def expected(plan: Plan, rank: int) -> float | None:
    """Seconds of computing per micro-batch that the plan predicts of a rank; None: it does not say."""
    placed = plan.ranks[rank]
    if placed.replica is None:
        return None
    costs = [plan.cost(placed.replica, s) for s in placed.stages]
    depths = [plan.replicas[placed.replica].stages[s].depth for s in placed.stages]
    known = [cost.compute_at(depth) for cost, depth in zip(costs, depths, strict=True) if cost]
    return sum(known) if known and len(known) == len(costs) else None


def _behind_prediction(plan: Plan, paces: Paces) -> list[Straggler]:
    """Ranks that fall behind what was predicted more than the others do.

    Measured costs hold for all devices: the rank that keeps closest to them says how much all are slowed. The table's
    are held against each other among devices of one kind and speed only, whose work it may misjudge as unlike as it is.
    """
    ratios = {rank: pace / ahead for rank, pace in paces.items() if (ahead := expected(plan, rank))}
    found = []
    for rank, ratio in ratios.items():
        placed = plan.ranks[rank]
        if plan.predicted is not None and plan.predicted.basis == "measured":
            usual, limit = max(1.0, min(ratios.values())), SLOW
        else:
            like = [v for r, v in ratios.items() if r != rank and _kind(plan, r) == _kind(plan, rank)]
            usual, limit = statistics.median(like or [ratio]), UNSURE
        if ratio > limit * usual > 0:
            found.append(Straggler(rank, placed.host, placed.device_class, ratio / usual, "prediction"))
    return found


def _kind(plan: Plan, rank: int) -> tuple[str, float]:
    return plan.ranks[rank].device_class, plan.ranks[rank].speed


def _behind_their_like(plan: Plan, paces: Paces) -> list[Straggler]:
    """Ranks much slower than others that do exactly the same on the same kind of device."""
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
    return found


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

    A replica of p stages takes (m + p - 1) turns of its slowest rank, and as many micro-batches as make the slowest
    replica as fast as whole ones allow.
    """
    turns = [max(paces[r] for s in replica.stages for r in s.ranks) for replica in plan.replicas]
    depths = [len(replica.stages) for replica in plan.replicas]
    counts = [replica.stages[0].micro_batches for replica in plan.replicas]
    chosen = ended_soonest(sum(counts), turns, depths)
    before, after = (_slowest(c, turns, depths) for c in (counts, chosen))
    if after > before * (1 - WORTH):
        return None
    replicas = tuple(_with_count(r, count) for r, count in zip(plan.replicas, chosen, strict=True))
    return replace(plan, replicas=replicas)


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
