"""One arrangement made exact: pool uses in an order, micro-batches and a schedule become a timed pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hetctl.trainer.planning.partition import Split, best_split, fixed_split, holmes_layers, uniform_layers
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.simulate import PipelineTimes, StageTimes, step_seconds
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import MemoryChoice, StageCostCache, StageCosts, StagePlace, SyncRate, share
from hetctl.trainer.schedule import Schedule


@dataclass(frozen=True)
class Batching:
    """A replica's micro-batches, and how it sums gradients with the others (None: it is alone)."""

    micro_batch_size: int
    micro_batches: int
    replicas: int = 1
    sync: SyncRate | None = None

    @property
    def samples(self) -> int:
        return self.micro_batch_size * self.micro_batches

    def place(
        self, stage: int, stages: int, *, width: int, held: int, turn: tuple[float, float] = (1.0, 0.0)
    ) -> StagePlace:
        """Where one of so many stages stands that holds `held` micro-batches; `turn` as of `round_trips`."""
        samples = share(self.micro_batch_size, width)
        return StagePlace(stage == 0, stage == stages - 1, samples, held, *turn, self.sync, self.replicas)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A replica with everything decided, and what it takes."""

    uses: tuple[PoolUse, ...]
    batching: Batching
    choices: tuple[MemoryChoice, ...]
    memory_bytes: tuple[int, ...]  # per stage, on each of its ranks
    times: PipelineTimes

    @property
    def schedule(self) -> str:
        return self.times.schedule

    @property
    def forwards_ahead(self) -> tuple[int, ...]:
        return self.times.forwards_ahead

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return self.times.layers

    @property
    def chunks(self) -> int:
        """Stages per device: micro-batches go round all devices so often."""
        return self.times.chunks

    @cached_property
    def seconds(self) -> float:
        """Of a step, were this replica alone, as simulated."""
        return step_seconds([self.times])

    @property
    def end_s(self) -> float:
        """Once a step, on the stage where it takes longest: exposed gradient sums, optimiser."""
        return max(stage.sync_s + stage.update_s for stage in self.times.stages)

    @property
    def stage_uses(self) -> tuple[PoolUse, ...]:
        """The pool use of each stage."""
        return tuple(use for use in self.uses for _ in range(use.stages)) * self.chunks

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        return tuple(use.stage_ranks(k) for use in self.uses for k in range(use.stages)) * self.chunks

    @property
    def arrangement(self) -> tuple[object, ...]:
        """What tells two pipelines apart beyond their times."""
        return (tuple((u.pool.name, u.tensor, u.stages, u.width) for u in self.uses), self.layers, self.batching)


def searched_schedules(problem: Problem) -> list[Schedule]:
    """Those that arrangements are found under: others are tried on what 1F1B's in flight make the best.

    GPipe is left out of larger searches: eager 1F1B hides as much with less in flight.
    """
    timed = [s for s in problem.schedules if s.timed_by_search]
    if problem.tolerance and len(timed) > 1:
        timed = [s for s in timed if s.automatic == "always"]
    return timed or list(problem.schedules)


def arrange(
    problem: Problem,
    stage_costs: StageCostCache,
    uses: tuple[PoolUse, ...],
    batching: Batching,
    *,
    schedule: Schedule,
    bound: float = float("inf"),
) -> Pipeline | None:
    """The best split of an arrangement by the closed form; None when nothing fits or none takes less than `bound`.

    `sum(beat) + 2 sum(hop) + max((m - 1) max(hop), max((m - 1) turn + end))` seconds; what it takes is simulated.
    """
    stages = tuple(use for use in uses for _ in range(use.stages))
    count = batching.micro_batches
    ahead = _ahead(problem, len(stages), count, schedule)
    payload = problem.costs.boundary_bytes(batching.micro_batch_size)
    hops = tuple(problem.links.hop_seconds(a, b, payload) for a, b in pairwise(stages))
    fill, floor = 2 * sum(hops), (count - 1) * max(hops, default=0.0)
    turns = round_trips(hops, ahead, micro_batches=count)
    found = [
        stage_costs.of(
            use.site, batching.place(i, len(stages), width=use.width, held=min(ahead[i], count), turn=turns[i])
        )
        for i, use in enumerate(stages)
    ]
    split = _split(problem, stages, found, count, floor, bound - fill)
    if split is None:
        return None
    held = list(zip(found, split.rows, split.layers, strict=True))
    timed = [_times(problem, use, batching, *one) for use, one in zip(stages, held, strict=True)]
    bridged = tuple(a.pool.island != b.pool.island for a, b in pairwise(stages))
    return Pipeline(
        uses,
        batching,
        tuple(f.choices[r] for f, r, _ in held),
        tuple(int(f.memory[r, k]) for f, r, k in held),
        PipelineTimes(tuple(timed), hops, bridged, count, ahead, split.layers, schedule.name),
    )


def _times(problem: Problem, use: PoolUse, batching: Batching, costs: StageCosts, row: int, layers: int) -> StageTimes:
    """What the simulator is told of a stage with so many layers, run in one of its ways."""
    rates, tensor = use.pool.rates, use.tensor
    forward, update = float(costs.forward[row, layers]), float(costs.update[row, layers])
    backward, sums = float(costs.table.beat[row, layers]) - forward, float(costs.table.end[row, layers]) - update
    weights = problem.costs.weight_gradients(rates, share(batching.micro_batch_size, use.width), tensor=tensor)
    return StageTimes(forward, backward, max(sums, 0.0), update, layers * weights)


def round_trips(hops: Sequence[float], in_flight: Sequence[int], *, micro_batches: int) -> list[tuple[float, float]]:
    """(ratio, wait) per stage: it turns round no faster than `ratio * beat + wait` per micro-batch.

    A stage's next forward waits for the backward of the micro-batch `in_flight` before it, which has been to the
    last stage and back: as many beats as there are stages from here on (taken as long as this stage's), and all
    hops from here on, twice. Where all micro-batches may be in flight nothing waits.
    """
    stages = len(in_flight)
    return [
        (1.0, 0.0) if ahead >= micro_batches else ((stages - i) / ahead, 2 * sum(hops[i:]) / ahead)
        for i, ahead in enumerate(in_flight)
    ]


def _ahead(problem: Problem, stages: int, micro_batches: int, schedule: Schedule) -> tuple[int, ...]:
    if problem.forwards_ahead is not None:
        assert len(problem.forwards_ahead) == stages, "it pins the number of stages"
        return problem.forwards_ahead
    return schedule.in_flight(stages, micro_batches)


def _split(
    problem: Problem, stages: Sequence[PoolUse], found: Sequence[StageCosts], count: int, floor: float, bound: float
) -> Split | None:
    tables, layers = [f.table for f in found], problem.costs.shape.layers
    if problem.layers is None and problem.split == "auto":
        tolerance = problem.tolerance
        return best_split(tables, layers, micro_batches=count, floor=floor, bound=bound, tolerance=tolerance)
    if problem.layers is not None:
        fixed = problem.layers
    elif problem.split == "uniform":
        fixed = uniform_layers(len(stages), layers)
    else:
        speeds = [u.pool.rates.flops_per_s * u.width * u.tensor for u in stages]
        fixed = holmes_layers(speeds, layers, alpha=problem.alpha)
    if len(fixed) != len(stages) or min(fixed) < 1:
        return None
    split = fixed_split(tables, fixed, micro_batches=count, floor=floor)
    return split if split is not None and split.seconds < bound else None
