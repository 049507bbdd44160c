"""One arrangement made exact: pool uses in an order, micro-batches and a schedule become a timed pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetctl.trainer.planning.partition import Split, best_split, fixed_split, holmes_layers, uniform_layers
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import MemoryChoice, StageCostCache, StageCosts, StagePlace, SyncRate, share
from hetctl.trainer.schedule import SCHEDULES, Schedule


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
    """A replica with everything decided. `hops` are seconds per boundary and direction."""

    uses: tuple[PoolUse, ...]
    batching: Batching
    schedule: str
    forwards_ahead: tuple[int, ...]
    layers: tuple[int, ...]
    choices: tuple[MemoryChoice, ...]
    memory_bytes: tuple[int, ...]  # per stage, on each of its ranks
    hops: tuple[float, ...]
    seconds: float  # of a step, by the closed form
    end_s: float  # once a step, on the stage where it takes longest: exposed gradient sums, optimiser
    chunks: int = 1  # stages per device: micro-batches go round all devices so often

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


def schedules(problem: Problem, pools: Iterable[Pool]) -> list[Schedule]:
    """Schedules worth trying for a pipeline of these pools: some only where a bridge is crossed."""
    if problem.schedule != "auto":
        return [SCHEDULES[problem.schedule]]
    wanted = ("always", "across islands") if len({p.island for p in pools}) > 1 else ("always",)
    return [s for s in SCHEDULES.values() if s.automatic in wanted]


def arrange(
    problem: Problem,
    stage_costs: StageCostCache,
    uses: tuple[PoolUse, ...],
    batching: Batching,
    *,
    schedule: Schedule,
    bound: float = float("inf"),
) -> Pipeline | None:
    """The exact best split of an arrangement; None when nothing fits or nothing is faster than `bound` seconds.

    Seconds: `sum(beat) + 2 sum(hop) + max((m - 1) max(hop), max((m - 1) turn + end))`.
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
    memory = tuple(int(f.memory[r, k]) for f, r, k in zip(found, split.rows, split.layers, strict=True))
    choices = tuple(f.choices[r] for f, r in zip(found, split.rows, strict=True))
    end = max(float(f.table.end[r, k]) for f, r, k in zip(found, split.rows, split.layers, strict=True))
    return Pipeline(
        uses, batching, schedule.name, ahead, split.layers, choices, memory, hops, split.seconds + fill, end
    )


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
