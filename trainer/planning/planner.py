"""The planner's face: a cluster and a recipe in, the fastest validated plan out, with what it weighed."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import Infeasible
from hetctl.comm.contract.plan import Plan, Predicted, Replica, Stage, StageCost
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.assemble import assemble
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.explain import refuse
from hetctl.trainer.planning.pipelines import Pipelines
from hetctl.trainer.planning.pools import seats
from hetctl.trainer.planning.predict import (
    Prediction,
    alone_samples_per_s,
    bound_samples_per_s,
    mfu,
)
from hetctl.trainer.planning.problem import Problem, read_problem
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.planning.reasons import reasons
from hetctl.trainer.planning.reschedule import deepened, under_schedules
from hetctl.trainer.planning.search import Candidate, Search, SearchResult
from hetctl.trainer.planning.state_sharding import SPARE_BYTES, with_whole
from hetctl.trainer.planning.would_fit import Asked
from hetctl.trainer.recipe import Recipe

KEEP = 64  # arrangements that are tried under every schedule
FEW = 8  # in larger searches
SIMULATED = 6  # the choice and the next five
AS_FAST = 1e-3  # relative: of plans so near to the fastest, the one whose fullest device is least full is taken,
HALF_FULL = 0.5  # unless all devices have as much left
OVER = (
    "Replicas share out optimiser state: each rank sums its part of the gradients, and weights come back "
    "during the next forward (train.sharded)."
)
LARGE = 1024  # devices from which on fewer are kept, for the time that comparing near-equals takes


@dataclass(frozen=True, eq=False)
class Planning:
    """A plan with everything that was weighed: predictions of all kept candidates, the chosen one first."""

    plan: Plan
    problem: Problem
    predictions: tuple[Prediction, ...]
    found: SearchResult
    alone: Mapping[str, float | None]  # island -> samples per second of its own best plan

    def alternative(self, cluster: Cluster, recipe: Recipe, number: int) -> Plan:
        """The plan of the candidate at `number` (0 is the chosen one), to be run against the others."""
        return _plan(cluster, recipe, self.problem, self.predictions[number], self.alone, ("An alternative.",))


def make_plan(
    cluster: Cluster,
    recipe: Recipe,
    *,
    speeds: Mapping[str, float] | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The fastest plan the cost model knows. Raises Infeasible or ConfigError."""
    return weigh(cluster, recipe, speeds=speeds, profile=profile).plan


@contextmanager
def _uncollected() -> Iterator[None]:
    """Planning makes millions of objects and no circles of them: looking for such takes 4 to 9 % of its time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@_uncollected()
def weigh(
    cluster: Cluster,
    recipe: Recipe,
    *,
    speeds: Mapping[str, float] | None = None,
    profile: Profile | None = None,
) -> Planning:
    """The fastest plan and the candidates it was weighed against. Raises Infeasible or ConfigError."""
    problem = read_problem(cluster, recipe, speeds=speeds, profile=profile)
    search = Search(problem, keep=_keep(problem))
    asked = Asked.of(cluster, recipe, speeds, profile)
    found, predictions = _searched(asked, search)
    value_bytes = problem.costs.value_bytes
    if value_bytes.over_replicas and _lack_memory_to_share_out(asked, problem, predictions[0].candidate):
        # the search took it that replicas share out state
        costs = replace(problem.costs, value_bytes=replace(value_bytes, over_replicas=False))
        problem = replace(problem, costs=costs)
        found, predictions = _searched(asked, Search(problem, keep=_keep(problem), like=search))
    islands = dict.fromkeys(p.island for p in problem.pools)
    alone = {name: alone_samples_per_s(problem, name) for name in islands}
    why = reasons(problem, predictions[0], found, alone)
    plan = _plan(cluster, recipe, problem, predictions[0], alone, why)
    plan.validate(where="the plan", layers=problem.costs.shape.layers)
    return Planning(plan, problem, predictions, found, alone)


def _keep(problem: Problem) -> int:
    """How many arrangements are kept."""
    if sum(p.size for p in problem.pools) >= LARGE:
        return 2
    return FEW if problem.tolerance else KEEP


def _searched(asked: Asked, search: Search) -> tuple[SearchResult, tuple[Prediction, ...]]:
    """What the search finds, and its fastest simulated, the one to take first. Raises Infeasible."""
    found = search.run()
    if not found.candidates:
        refuse(search.problem, asked)
    fastest = sorted(_predictions(search.problem, found, search.pipelines), key=_rank)
    as_fast = [p for p in fastest if _rank(p) <= _rank(fastest[0]) * (1 + AS_FAST)]
    first = min(as_fast, key=lambda p: max(HALF_FULL, _fullest(search.problem, p.candidate)))
    return found, (first, *(p for p in fastest if p is not first))


def _predictions(problem: Problem, found: SearchResult, pipelines: Pipelines) -> list[Prediction]:
    """The fastest of all candidates under all schedules. Raises Infeasible where none can have what is asked for."""
    made = under_schedules(problem, found.candidates)
    if not made:
        raise Infeasible(
            f"no plan that was found can run the {problem.schedules[0].name} schedule: memory, or micro-batches that "
            "do not divide by the stages",
            hint="pin parallelism.pipeline to 2 or more, another batch.micro_batch_size, or leave the schedule free",
        )
    fastest = sorted(made, key=lambda c: c.step_s * c.handicap)[:SIMULATED]
    return [Prediction(deepened(problem, c, pipelines)) for c in fastest]


def _rank(prediction: Prediction) -> float:
    return prediction.seconds * prediction.candidate.handicap


def _plan(
    cluster: Cluster,
    recipe: Recipe,
    problem: Problem,
    chosen: Prediction,
    alone: Mapping[str, float | None],
    why: tuple[str, ...],
) -> Plan:
    replicas, memory, over = _shared_out(cluster, recipe, problem, chosen.candidate)
    longest = max(chosen.candidate.pipelines, key=lambda p: len(p.layers))
    return assemble(
        cluster,
        recipe,
        problem.costs.shape,
        replicas=replicas,
        schedule=longest.schedule,
        forwards_ahead=longest.forwards_ahead,
        predicted=_predicted(problem, chosen, replicas, memory, alone),
        reasons=(*why, OVER) if over else why,
        measured=problem.links.measured,
        over_replicas=over,
    )


def _shared_out(
    cluster: Cluster, recipe: Recipe, problem: Problem, candidate: Candidate
) -> tuple[tuple[Replica, ...], tuple[int, ...], bool]:
    """The candidate's replicas, each rank's memory, and whether state is shared out over all replicas."""
    limits, memory = [device.room_bytes for _, _, _, device in seats(cluster)], _memory(problem, candidate)
    return with_whole(_replicas(candidate), memory, limits, costs=problem.costs, asked=recipe.train.sharded)


def _lack_memory_to_share_out(asked: Asked, problem: Problem, candidate: Candidate) -> bool:
    """Whether there are several replicas, and these cannot share out state."""
    replicas, _, over = _shared_out(asked.cluster, asked.recipe, problem, candidate)
    return len(replicas) > 1 and not over


def _replicas(candidate: Candidate) -> tuple[Replica, ...]:
    """The candidate's pipelines as replicas; clones share a pipeline's width and micro-batches evenly."""
    found = []
    for pipeline in candidate.pipelines:
        found += [_replica(pipeline, clone, candidate.clones) for clone in range(candidate.clones)]
    return tuple(found)


def _replica(pipeline: Pipeline, clone: int, clones: int) -> Replica:
    spans, batching = pairwise(accumulate((0, *pipeline.layers))), pipeline.batching
    stages = []
    for span, (use, ranks, _, choice, *_) in zip(spans, pipeline.stages, strict=True):
        count = len(ranks) // clones
        stages.append(
            Stage(
                layers=span,
                ranks=ranks[clone * count : (clone + 1) * count],
                micro_batch_size=batching.micro_batch_size // clones,
                micro_batches=batching.micro_batches,
                tensor_parallel=use.tensor,
                shards=choice.shards,
                recompute=choice.mode.recompute,
                offload=choice.mode.offload,
                offload_activations=choice.mode.activations,
            )
        )
    return Replica(tuple(stages), pipeline.forwards_ahead)


def _fullest(problem: Problem, candidate: Candidate) -> float:
    """The largest share of its usable memory that a rank holds, by what the search knows."""
    held = _memory(problem, candidate)
    return max(stage.memory_share(held) for _, _, stage in candidate.stages)


def _memory(problem: Problem, candidate: Candidate) -> list[int]:
    """Bytes per rank, as the search accounted for them."""
    memory = [0] * sum(p.size for p in problem.pools)  # an idle device needs none
    for _, _, stage in candidate.stages:
        for rank in stage.ranks:
            memory[rank] = stage.memory_bytes
    return memory


def _stage_costs(
    problem: Problem, chosen: Prediction, number: int, replica: Replica, memory: Sequence[int]
) -> tuple[StageCost, ...]:
    """What a rank of each stage computes in a micro-batch, and how far the stage may grow.

    Certainly as far as its memory would do if all of it were in proportion to its layers.
    """
    pipeline, found = chosen.candidate.pipelines[number // chosen.candidate.clones], []
    for stage, use, costs in zip(replica.stages, pipeline.stage_uses, pipeline.costs, strict=True):
        layers, there = stage.depth, (costs.forward, costs.backward)
        room = usable_bytes(use.site.rates) - (SPARE_BYTES if stage.whole else 0)
        most = int(room * layers / max(1, *(memory[rank] for rank in stage.ranks)))
        beat, block = sum(c.at(layers) for c in there), sum(c.each for c in there)
        found.append(StageCost.of(stage, beat, block, max(layers, most)))
    return tuple(found)


def _predicted(
    problem: Problem,
    chosen: Prediction,
    replicas: tuple[Replica, ...],
    memory: tuple[int, ...],
    alone: Mapping[str, float | None],
) -> Predicted:
    per_s = problem.samples / chosen.seconds
    own = list(alone.values())
    efficiency = per_s / sum(r for r in own if r is not None) if None not in own else None
    return Predicted(
        basis=problem.basis,
        step_time_s=chosen.seconds,
        tokens_per_s=per_s * problem.costs.seq_len,
        bubble_share=chosen.bubble_share,
        bridge_share=chosen.bridge_share,
        efficiency=efficiency,
        memory_bytes=memory,
        mfu=mfu(problem, chosen.seconds),
        bound_tokens_per_s=bound_samples_per_s(problem) * problem.costs.seq_len,
        stages=tuple(_stage_costs(problem, chosen, number, one, memory) for number, one in enumerate(replicas)),
    )
