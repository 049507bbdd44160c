"""A predicted step as pages show it: what is done when, and a rank's memory by use.

Of memory, state is what its bytes a parameter come to; activations are what the prediction has beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.comm.contract.plan import Plan, Replica, Stage
from hetctl.trainer.planning.costs import LayerCosts
from hetctl.trainer.planning.planner import Planning
from hetctl.trainer.planning.simulate import SimulatedSpan
from hetctl.trainer.planning.state_sharding import held_on, spared_layers

USES = ("weights", "gradients", "optimiser", "activations")


@dataclass(frozen=True)
class PredictedStep:
    """What the pages show of a prediction beyond the plan's own figures: the simulated step, each replica of which
    stands for `clones` of the plan, and each rank's memory by use."""

    spans: tuple[SimulatedSpan, ...]
    clones: int
    memory: tuple[Mapping[str, int] | None, ...]

    @classmethod
    def of(cls, planning: Planning) -> PredictedStep:
        """Of what the planner chose."""
        chosen = planning.predictions[0]
        memory = memory_parts(planning.plan, planning.problem.costs)
        return cls(chosen.simulated.spans, chosen.candidate.clones, tuple(memory))

    def of_replica(self, plan: Plan, number: int) -> Replica:
        """The plan's replica that a simulated one stands for."""
        return plan.replicas[number * self.clones]


def memory_parts(plan: Plan, costs: LayerCosts) -> list[Mapping[str, int] | None]:
    """Bytes of each use on each rank, None where the prediction does not hold its state (plan files are edited).

    Activations are all that is no state: those kept for backward, and buffers. An idle rank holds nothing.
    """
    if plan.predicted is None:
        return [None] * plan.world_size
    every = [stage for replica in plan.replicas for stage in replica.stages]
    held = [dict.fromkeys(USES, 0) for _ in plan.ranks]
    for stage in every:
        state = _state(plan, costs, stage, every)
        for rank in stage.ranks:
            for use, size in state.items():
                held[rank][use] += size
    return [_with_rest(parts, need) for parts, need in zip(held, plan.predicted.memory_bytes, strict=True)]


def _state(plan: Plan, costs: LayerCosts, stage: Stage, every: list[Stage]) -> dict[str, int]:
    """Of one stage on each of its ranks. Masters count to the optimiser where computation has a copy of its own."""
    n, (trained, frozen) = costs.value_bytes, held_on(costs, stage)
    part = 1 if stage.whole or stage.shards == 1 else 1 / stage.shards
    copy = n.copy or (n.compute if stage.offload else n.weights)
    kept = 0 if stage.offload else n.optimizer + (n.weights if n.copy else 0)
    spared = spared_layers(every, stage) / max(1, stage.depth) if plan.over_replicas else 0.0
    return {
        "weights": int((trained * copy + frozen) * part),
        "gradients": int(trained * n.gradients * part),
        "optimiser": int(trained * kept * (1 / stage.shards - spared)),
    }


def _with_rest(parts: dict[str, int], need: int) -> Mapping[str, int] | None:
    rest = need - sum(parts.values())
    return parts | {"activations": max(0, rest)} if rest > -0.01 * need else None
