"""One arrangement made exact: pool uses in an order, micro-batches and a schedule become a timed pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations, starmap
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.partition import Split, fixed_split, holmes_layers, uniform_layers
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.simulate import NOT_TIED, PipelineTimes, TiedSum, least_seconds, step_seconds
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import Coefficients, MemoryChoice, StageCostCache, StagePlace, SyncRate, share
from hetctl.trainer.schedule import SCHEDULES, Schedule

SPLIT_TOLERANCE = 0.005  # of larger searches: layers are moved one by one afterwards
FEW_STAGES = 4  # among these a layer may go from any to any
WORTH_MOVING = 1e-4  # relative gain


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

    def place(self, stage: int, stages: int, *, width: int, held: int, trip_s: float = 0.0) -> StagePlace:
        """Where one of so many stages stands that holds `held` micro-batches, transfers to the last and back."""
        samples, waits = share(self.micro_batch_size, width), held < self.micro_batches
        first, last = stage == 0, stage == stages - 1
        return StagePlace(first, last, samples, held, waits, trip_s if waits else 0.0, self.sync, self.replicas)


class PipelineStage(NamedTuple):
    """A stage with everything decided."""

    use: PoolUse
    ranks: tuple[int, ...]
    layers: int
    choice: MemoryChoice
    costs: Coefficients[float]
    memory_bytes: int  # on each of its ranks

    def memory_share(self, held: Sequence[int]) -> float:
        """Of what is usable on its devices, by the bytes that each rank of the plan holds."""
        return max(held[rank] for rank in self.ranks) / usable_bytes(self.use.pool.rates)

    @property
    def host_bytes(self) -> float:
        """In its host's memory, of each of its ranks."""
        return self.costs.host.at(self.layers)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A replica with everything decided, and what it takes."""

    uses: tuple[PoolUse, ...]
    batching: Batching
    choices: tuple[MemoryChoice, ...]
    costs: tuple[Coefficients[float], ...]  # of each stage
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
    def stages(self) -> tuple[PipelineStage, ...]:
        """Each stage with all that is known of it."""
        ranks = [held for use in self.uses for held in use.stage_ranks] * self.chunks
        known = zip(self.stage_uses, ranks, self.layers, self.choices, self.costs, self.memory_bytes, strict=True)
        return tuple(starmap(PipelineStage, known))

    @cached_property
    def arrangement(self) -> tuple[object, ...]:
        """What tells two pipelines apart beyond their times."""
        uses = tuple((u.pool.name, u.tensor, u.stages, u.width) for u in self.uses)
        return (uses, self.layers, self.batching, self.schedule)


def searched_schedules(problem: Problem) -> list[Schedule]:
    """Those that arrangements are found under: others are tried on what these make the best.

    GPipe is left out of larger searches: eager 1F1B hides as much with less in flight.
    """
    timed = [s for s in problem.schedules if s.timed_by_search]
    timed = timed or [s for s in SCHEDULES.values() if s.timed_by_search and s.automatic != "never"]
    if problem.tolerance and len(timed) > 1:
        timed = [s for s in timed if s.automatic == "always"]
    return timed


_Held = tuple[tuple[int, ...], tuple[int, ...]]  # layers of each stage, and its row of what it costs


class Arrangement:
    """Pool uses in an order, with their micro-batches and a schedule: all but who holds which layers."""

    def __init__(
        self,
        problem: Problem,
        stage_costs: StageCostCache,
        uses: tuple[PoolUse, ...],
        batching: Batching,
        schedule: Schedule,
        ahead: tuple[int, ...] | None = None,
    ) -> None:
        self.problem, self.uses, self.batching, self.schedule = problem, uses, batching, schedule
        self.stages = tuple(use for use in uses for _ in range(use.stages))
        count, places = batching.micro_batches, range(len(self.stages))
        self.ahead = ahead or _ahead(problem, len(self.stages), count, schedule)
        payload = problem.costs.hop_bytes(batching.micro_batch_size)
        self.hops = problem.links.hops(self.stages, payload)
        self.tied, self.bridged = tied_sum(problem, self.stages), bridged(self.stages)
        trips = [2 * sum(self.hops[i:]) for i in places]
        held = [min(ahead, count) for ahead in self.ahead]
        widths = [use.width for use in self.stages]
        at = [batching.place(i, len(places), width=widths[i], held=held[i], trip_s=trips[i]) for i in places]
        self.costs = tuple(stage_costs.of(use.site, place) for use, place in zip(self.stages, at, strict=True))
        self.splits = stage_costs.splits(self.costs)

    def best(self, *, bound: float = inf) -> Pipeline | None:
        """The best split by the closed form; None when nothing fits or none takes less than `bound`.

        `sum(beat) + 2 sum(hop) + (m - 1) max(hop, turn) + max(end) + tied` seconds; what it takes is simulated.
        """
        further = self.batching.micro_batches - 1
        fill, floor = 2 * sum(self.hops) + self.tied.seconds, further * max(self.hops, default=0.0)
        split = self._split(floor, bound - fill)
        return None if split is None else self._made(split.layers, split.rows)

    def _split(self, floor: float, bound: float) -> Split | None:
        """The best, or the one that is asked for; None where it takes no less than the bound."""
        problem, count = self.problem, self.batching.micro_batches
        if problem.layers is None and problem.split == "auto":
            tolerance = SPLIT_TOLERANCE if problem.tolerance else 0.0
            return self.splits.best(count, floor=floor, bound=bound, tolerance=tolerance)
        if problem.layers is not None:
            fixed = problem.layers
        elif problem.split == "uniform":
            fixed = uniform_layers(len(self.stages), problem.costs.shape.layers)
        else:
            speeds = [u.pool.rates.flops_per_s * u.width * u.tensor for u in self.stages]
            fixed = holmes_layers(speeds, problem.costs.shape.layers, alpha=problem.alpha)
        if len(fixed) != len(self.stages) or min(fixed) < 1:
            return None
        split = fixed_split(self.splits.tables, fixed, micro_batches=count, floor=floor)
        return split if split is not None and split.seconds < bound else None

    def improved(self, pipeline: Pipeline) -> Pipeline:
        """One of its pipelines with layers moved between stages, or a stage run another way, one by one, for as long as
        it takes less simulated.

        The closed form knows no idle time that forwards in flight fill: so early stages may hold more than it says, and
        a late one may sum for longer, since those before it still run backwards.
        """
        rows = [costs.choices.index(choice) for costs, choice in zip(self.costs, pipeline.choices, strict=True)]
        held = first = (pipeline.layers, tuple(rows))
        best, worth = held if len(self.stages) > 1 else None, pipeline.seconds * (1 - WORTH_MOVING)
        while best is not None:
            held, best = best, None
            for moves in (self._moved(held), self._other_ways(held)):
                for moved in moves if best is None else ():
                    times = self._times(*moved)
                    if least_seconds(times) < worth and (seconds := step_seconds([times])) < worth:
                        best, worth = moved, seconds
            worth *= 1 - WORTH_MOVING
        return pipeline if held is first else self._made(*held)

    def with_layers(self, layers: tuple[int, ...]) -> Pipeline | None:
        """These layers, each stage in its fastest way; None where one does not fit."""
        rows = self._fastest(layers)
        return None if rows is None else self._made(layers, rows)

    def _fastest(self, layers: tuple[int, ...]) -> tuple[int, ...] | None:
        rows = [c.fastest(self.batching.micro_batches)[k] for c, k in zip(self.costs, layers, strict=True)]
        found = tuple(row for row in rows if row is not None)
        return found if len(found) == len(rows) else None

    def _moved(self, held: _Held) -> Iterator[_Held]:
        """A layer of one stage given to another, each stage in its fastest way."""
        for layers in _one_moved(held[0]):
            rows = self._fastest(layers)
            if rows is not None:
                yield layers, rows

    def _other_ways(self, held: _Held) -> Iterator[_Held]:
        """One stage run as another of its rows says, in less time a beat."""
        layers, rows = held
        for stage, (costs, own) in enumerate(zip(self.costs, rows, strict=True)):
            beats = costs.table.beat[:, layers[stage]]
            for row in np.flatnonzero(beats < beats[own]).tolist():
                yield layers, (*rows[:stage], row, *rows[stage + 1 :])

    def _times(self, layers: tuple[int, ...], rows: tuple[int, ...]) -> PipelineTimes:
        timed = tuple(f.times(r, k) for f, r, k in zip(self.costs, rows, layers, strict=True))
        count, name = self.batching.micro_batches, self.schedule.name
        return PipelineTimes(timed, self.hops, self.bridged, count, self.ahead, layers, name, tied=self.tied)

    def _made(self, layers: tuple[int, ...], rows: tuple[int, ...]) -> Pipeline:
        held = list(zip(self.costs, rows, layers, strict=True))
        return Pipeline(
            self.uses,
            self.batching,
            tuple(f.choices[r] for f, r, _ in held),
            tuple(f.way(r) for f, r, _ in held),
            tuple(int(f.way(r).memory.at(k)) for f, r, k in held),
            self._times(layers, rows),
        )


def _one_moved(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to give one layer of a stage to another; of many stages only to the next."""
    for a, b in permutations(range(len(layers)), 2):
        if layers[a] > 1 and (len(layers) <= FEW_STAGES or abs(a - b) == 1):
            yield tuple(n - (i == a) + (i == b) for i, n in enumerate(layers))


def bridged(stages: Sequence[PoolUse]) -> tuple[bool, ...]:
    """Whether each boundary between stages is one between islands."""
    return tuple(a.pool.island != b.pool.island for a, b in pairwise(stages))


def hiding_all(times: PipelineTimes) -> tuple[int, ...]:
    """Forwards in flight that let no stage wait for a micro-batch's way to the last stage and back: that over a turn of
    the slowest stage or link, and one more."""
    turn = max((*(stage.forward_s + stage.backward_s for stage in times.stages), *times.hops))
    ahead, trip = list[int](), 0.0
    for stage, hop in zip(reversed(times.stages), (0.0, *reversed(times.hops)), strict=True):
        trip += stage.forward_s + stage.backward_s + 2 * hop
        ahead.append(min(times.micro_batches, 1 + ceil(trip / turn) if len(ahead) else 1))
    return tuple(reversed(ahead))


def _each(more: Callable[[int], int]) -> Callable[[PipelineTimes], tuple[int, ...]]:
    """More forwards in flight on each stage but the last."""
    return lambda times: tuple(min(times.micro_batches, more(a)) if a > 1 else 1 for a in times.forwards_ahead)


DEEPER = (hiding_all, _each(lambda a: ceil(1.5 * a)), _each(lambda a: a + 1))


def deeper(replicas: Sequence[PipelineTimes]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """More forwards in flight than each of these has, to be tried in this order: those that hide all, half as many
    again, and one more."""
    own = [times.forwards_ahead for times in replicas]
    for ahead in dict.fromkeys(tuple(map(more, replicas)) for more in DEEPER):
        if any(a > b for more, before in zip(ahead, own, strict=True) for a, b in zip(more, before, strict=True)):
            yield ahead


def tied_sum(problem: Problem, stages: Sequence[PoolUse]) -> TiedSum:
    """Of the first and the last stage of a pipeline, which hold the embedding both."""
    nbytes, first, last = problem.costs.tied_bytes, stages[0], stages[-1]
    if len(stages) == 1 or not nbytes or not problem.links.can_talk(first.pool, last.pool):
        return NOT_TIED
    return TiedSum(problem.links.tied_seconds(first, last, nbytes), first.pool.island != last.pool.island)


def _ahead(problem: Problem, stages: int, micro_batches: int, schedule: Schedule) -> tuple[int, ...]:
    if problem.forwards_ahead is not None:
        assert len(problem.forwards_ahead) == stages, "it pins the number of stages"
        return problem.forwards_ahead
    return schedule.in_flight(stages, micro_batches)
