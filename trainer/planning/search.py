"""The search: groupings of pools into replicas, uses of pools, batches, held against each other as simulated.

Few devices of few kinds: everything that bounds on the closed form leave. Many: what is likely (079).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from hetctl.trainer.planning.arrange import Batching, Pipeline, PipelineStage
from hetctl.trainer.planning.batching import TABULATED, balance, divisors, largest_remainder, settle
from hetctl.trainer.planning.groupings import Grouping, Groupings, slowest_sync, sums_seconds, unhidden
from hetctl.trainer.planning.partition import ROUGH
from hetctl.trainer.planning.pipelines import BoundedCombinations, Pipelines, WantedPipeline
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.simulate import step_seconds
from hetctl.trainer.planning.stages import SyncRate

SMALL = 32  # devices
WIDER = 1.12  # how much slower than the best under the searched schedules one may be, for what others may gain
IMPROVED = 8  # candidates whose splits are worked on
COMPETE = 3  # candidates that are to be the fastest there are
LIKELY = 8  # micro-batch sizes and counts of unequal replicas, where not every grouping is looked at
APART = 1.9  # factor between the micro-batch sizes, or counts, that larger searches try
LEAP = 0.1  # larger searches look for such improvements first: what is fast early prunes all that comes after
MOST_MICRO_BATCHES = 4096  # of a replica in a step: each is simulated
SAME = 1e-9  # relative: times closer than this are equal


Batch = Callable[[int], tuple[int, int]]  # a replica's part -> (micro-batch size, micro-batches)
Task = tuple[float, Callable[[], None]]  # about how fast what it finds might be, and what looks for it


@dataclass(frozen=True, eq=False)
class Candidate:
    """A whole arrangement: one pipeline per replica; each stands for `clones` equal, narrower ones."""

    pipelines: tuple[Pipeline, ...]
    seconds: float
    clones: int = 1
    handicap: float = 1.0  # what the seconds are multiplied with when candidates are compared

    @property
    def rank(self) -> float:
        return self.seconds * self.handicap

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, as all replicas together are simulated."""
        return step_seconds([p.times for p in self.pipelines])

    @property
    def stages(self) -> list[tuple[int, int, PipelineStage]]:
        """(pipeline, place in it, stage) of every stage."""
        return [(n, i, stage) for n, p in enumerate(self.pipelines) for i, stage in enumerate(p.stages)]

    @cached_property
    def arrangement(self) -> tuple[object, ...]:
        return tuple(p.arrangement for p in self.pipelines)


@dataclass
class SearchResult:
    """What a search came to: candidates fastest first, how much it looked at, and how fine it was."""

    candidates: list[Candidate] = field(default_factory=list)
    tolerance: float = 0.0  # relative: gains smaller than this were not looked for
    tried: int = 0  # arrangements whose split was worked out
    thinned: bool = False  # not every use of a pool, or not every grouping, was looked at


class Search:
    """One run over a problem; keeps the `keep` fastest distinct arrangements that take less than `below` seconds.

    `like` has searched the same at other prices between replicas.
    """

    def __init__(self, problem: Problem, *, keep: int = 6, below: float = math.inf, like: Search | None = None) -> None:
        self.below = below
        self.problem, self.keep = problem, keep
        self.tolerance = problem.tolerance
        self.apart = 1.0 if problem.tolerance == 0 else APART
        self.compete = min(keep, COMPETE) if self.tolerance == 0 else 1
        self.pipelines: Pipelines = Pipelines(problem, like=like.pipelines if like else None)
        self.groupings: Groupings = like.groupings if like else Groupings(problem, self.pipelines)
        self.found = SearchResult()
        for candidate in like.found.candidates if like and like.groupings.thinned else ():
            self._again(candidate)

    def _again(self, candidate: Candidate) -> None:
        """Offer what another search found, at the prices of this one."""
        made = [self.pipelines.again(p, p.batching) for p in candidate.pipelines]
        pipelines = tuple(p for p in made if p is not None)
        if len(pipelines) == len(made):
            self._offer(Candidate(pipelines, together(pipelines), candidate.clones, candidate.handicap))

    def run(self) -> SearchResult:
        """Search everything; `candidates` stays empty when nothing fits."""
        wanted = self.tolerance
        groupings = list(self.groupings.all)
        large = wanted > 0 and not self._small and not self.groupings.thinned
        if large:  # of equal bounds first what is looked at soonest: pipelines of few pools
            groupings.sort(key=lambda g: (float(f"{g.bound:.6g}"), -len(g.replicas)))
        for self.tolerance in (LEAP, wanted) if large else (wanted,):
            if self.groupings.thinned:
                self._most_promising(groupings, first=1 if wanted >= ROUGH else len(groupings))
                continue
            for grouping in groupings:
                if grouping.bound >= self.limit:
                    break
                self._most_promising([grouping])
        self._improve()
        pipelines, found = self.pipelines, self.found
        found.tolerance = self.tolerance
        found.tried, found.thinned = pipelines.tried, pipelines.thinned or self.groupings.thinned
        return found

    def _improve(self) -> None:
        """Move layers in the best candidates, and bring all into the order of what they take together."""
        kept = sorted(self.found.candidates, key=lambda c: c.step_s * c.handicap)
        better = [replace(c, pipelines=tuple(map(self.pipelines.improved, c.pipelines))) for c in kept[:IMPROVED]]
        kept[:IMPROVED] = [min(pair, key=lambda c: c.step_s) for pair in zip(better, kept[:IMPROVED], strict=True)]
        self.found.candidates = sorted(kept, key=lambda c: c.step_s * c.handicap)

    @property
    def limit(self) -> float:
        """Only what is faster than this is still of interest."""
        found = self.found.candidates
        if len(found) < self.compete:
            return self.below
        return min(self.below, found[self.compete - 1].rank * (1 - self.tolerance))

    def _offer(self, candidate: Candidate) -> None:
        """Keep the fastest, one per arrangement; of equal times the earlier stays first."""
        kept = self.found.candidates
        for index, other in enumerate(kept):
            if other.arrangement == candidate.arrangement:
                if other.rank <= candidate.rank * (1 + SAME):
                    return
                del kept[index]
                break
        place = next((i for i, c in enumerate(kept) if candidate.rank < c.rank * (1 - SAME)), len(kept))
        kept.insert(place, candidate)
        del kept[self.keep :]

    def _most_promising(self, groupings: Sequence[Grouping], first: int = 1) -> None:
        """What may come of these groupings, in the order of the times that they might take.

        The best of the `first` ones comes before the others are looked at: its limit spares these most of their bounds.
        """
        tasks = self._tasks(groupings[:first])
        for _, look in tasks[:1]:
            look()
        tasks = tasks[1:] + self._tasks(groupings[first:])
        for _, look in sorted(tasks, key=lambda task: task[0]):
            look()

    def _tasks(self, groupings: Sequence[Grouping]) -> list[Task]:
        """What may come of these groupings, what might take least first."""
        ways = [self._alone if len(grouping.replicas) == 1 else self._together for grouping in groupings]
        tasks = [task for way, grouping in zip(ways, groupings, strict=True) for task in way(grouping)]
        return sorted(tasks, key=lambda task: task[0])

    def _alone(self, grouping: Grouping) -> Iterator[Task]:
        """One replica: every micro-batch size."""
        total, sizes = self.problem.samples, self._sizes(grouping)
        batchings = [Batching(s, total // s) for s in sizes if s % grouping.clones == 0]
        untimed = any(not s.timed_by_search for s in self.problem.schedules)
        wider = WIDER if untimed and not self.problem.tolerance else 1.0
        for batching in batchings:
            wanted = WantedPipeline(grouping.replicas[0], batching, grouping.clones)
            bounds = self.pipelines.combinations(wanted, self.limit * wider)
            yield bounds.bound, partial(self._one_replica, grouping, wanted, bounds, wider)

    def _one_replica(
        self, grouping: Grouping, wanted: WantedPipeline, bounds: BoundedCombinations, wider: float
    ) -> None:
        for pipeline in self.pipelines.exact(wanted, bounds, lambda: self.limit * wider):
            self._offer(Candidate((pipeline,), pipeline.seconds, grouping.clones))

    def _together(self, grouping: Grouping) -> Iterator[Task]:
        """Several replicas: equal counts with unequal sizes, and equal sizes with unequal counts.

        Of unequal replicas one has at least its share by speed; if none of them is fast enough at that share, no
        other sharing is.
        """
        total, pinned = self.problem.samples, self.problem.micro_batch_size
        weights = [sum(map(self.pipelines.samples_per_s, pools)) for pools in grouping.replicas]
        counts = divisors(total, apart=self.apart) if pinned is None else []
        tasks = [(_sizes(m), total // m) for m in counts if m <= MOST_MICRO_BATCHES]
        tasks += [(_counts(s), total // s) for s in self._sizes(grouping)]
        weighed = []
        for batch, parts in tasks:
            if parts < len(weights):
                continue
            unequal = self._unequal(grouping, batch, weights, parts)
            shares = largest_remainder(parts, weights, least=1)
            estimate = unequal.likely if self.groupings.thinned else unequal.bound
            seconds = []
            for index, part in enumerate(shares):
                seconds.append(estimate(index, part, self._across))
                if self.groupings.thinned and seconds[-1] >= self._across:
                    break
            least = grouping.bound if self._small and parts <= TABULATED else min(seconds)
            if self.groupings.thinned:
                least = max(seconds)
            weighed.append((max(seconds), partial(self._several, grouping, weights, unequal, parts, least)))
        yield from sorted(weighed, key=lambda w: w[0])[: LIKELY if self.groupings.thinned else None]

    def _several(
        self, grouping: Grouping, weights: Sequence[float], unequal: UnequalReplicas, parts: int, least: float
    ) -> None:
        if least < self._across:
            self._balanced(grouping, weights, unequal, parts)

    def _sizes(self, grouping: Grouping) -> Sequence[int]:
        """Micro-batch sizes of a pipeline; a pinned one is each replica's, and clones share their pipeline's.

        None that makes for more micro-batches than the replicas may have together.
        """
        total, pinned = self.problem.samples, self.problem.micro_batch_size
        whole = divisors(total, apart=self.apart) if pinned is None else [pinned * grouping.clones]
        most = MOST_MICRO_BATCHES * len(grouping.replicas)
        return [size for size in whole if total % size == 0 and total // size <= most]

    @property
    def _small(self) -> bool:
        """Whether so few devices that every sharing can be looked at."""
        return sum(p.size for p in self.problem.pools) <= SMALL

    @property
    def _across(self) -> float:
        """The limit for replicas on several islands, their handicap taken off."""
        return self.limit / self.problem.across

    def _reach(self) -> float:
        """Up to which a replica's time is asked for; paces of shares that will change yet are of interest too."""
        return 2 * self._across if self.groupings.thinned else self._across

    def _unequal(self, grouping: Grouping, batch: Batch, weights: Sequence[float], parts: int) -> UnequalReplicas:
        replicas = grouping.replicas
        rates = tuple(slowest_sync(self.problem.links, replicas, i) for i in range(len(replicas)))
        per_part = self.problem.samples / parts
        speeds = tuple(w / per_part for w in weights)
        return UnequalReplicas(self.pipelines, grouping, batch, rates, speeds, self._reach)

    def _balanced(self, grouping: Grouping, weights: Sequence[float], unequal: UnequalReplicas, parts: int) -> None:
        """Offer the grouping with its samples shared so that the slowest replica is fastest."""
        limit = self._across
        if self.groupings.thinned:
            shares = settle(parts, weights, unequal, limit=limit)
        else:
            few = self._small
            shares = balance(parts, weights, unequal, limit=limit, tabulate=few, tolerance=self.tolerance)
        if shares is None:
            return
        chosen = [self.pipelines.fastest(unequal.wanted(i, part), math.inf) for i, part in enumerate(shares[0])]
        pipelines = tuple(p for p in chosen if p is not None)
        islands = {u.pool.island for p in pipelines for u in p.uses}
        handicap = self.problem.across if len(islands) > 1 else 1.0
        self._offer(Candidate(pipelines, together(pipelines), grouping.clones, handicap))


@dataclass(frozen=True)
class UnequalReplicas:
    """The replicas of a grouping, as balancing asks about them: `batch` says what a part of the samples is."""

    pipelines: Pipelines
    grouping: Grouping
    batch: Batch
    sync: tuple[SyncRate, ...]
    parts_per_s: tuple[float, ...]  # of each replica at most
    limit: Callable[[], float]

    def wanted(self, replica: int, part: int) -> WantedPipeline:
        size, count = self.batch(part)
        replicas = self.grouping.replicas
        batching = Batching(size, count, len(replicas), self.sync[replica])
        return WantedPipeline(replicas[replica], batching, self.grouping.clones)

    def bound(self, replica: int, part: int, limit: float) -> float:
        """A lower bound on the time of a share."""
        wanted = self.wanted(replica, part)
        return self.pipelines.bound(wanted, limit) if self._possible(wanted) else math.inf

    def seconds(self, replica: int, part: int) -> float:
        """The least time of a share; infinity at and beyond the search's limit."""
        wanted = self.wanted(replica, part)
        found = self.pipelines.fastest(wanted, self.limit()) if self._possible(wanted) else None
        return math.inf if found is None else found.seconds

    def alike(self, replica: int, found: int, part: int) -> float:
        """The time of a share in the arrangement that was found for another one; infinity where it does not fit."""
        wanted, other = self.wanted(replica, part), self.wanted(replica, found)
        return self.pipelines.alike(wanted, other) if self._possible(wanted) else math.inf

    def likely(self, replica: int, part: int, limit: float) -> float:
        """A bound on the time of a share, and about what gradient sums add, which bounds leave out."""
        seconds, (_, count) = self.bound(replica, part, limit), self.batch(part)
        costs, pools = self.pipelines.problem.costs, self.grouping.replicas[replica]
        sums = sums_seconds(costs, pools, self.sync[replica], len(self.sync))
        return seconds + unhidden(costs, sums, seconds / count)

    def faster(self, replica: int, part: int, limit: float) -> bool:
        """Whether a share takes less than a limit."""
        wanted = self.wanted(replica, part)
        return self._possible(wanted) and self.pipelines.faster(wanted, limit)

    def most(self, replica: int, limit: float) -> int:
        """What the replica's devices could at most compute in so many seconds."""
        return int(min(limit * self.parts_per_s[replica] * (1 + SAME), 1e9))

    def _possible(self, wanted: WantedPipeline) -> bool:
        batching = wanted.batching
        return batching.micro_batch_size % wanted.clones == 0 and batching.micro_batches <= MOST_MICRO_BATCHES


def together(pipelines: Sequence[Pipeline]) -> float:
    """Seconds of replicas side by side, as far as closed forms tell: none sums gradients before all have computed."""
    return max(p.seconds - p.end_s for p in pipelines) + max(p.end_s for p in pipelines)


def _sizes(count: int) -> Batch:
    return lambda part: (part, count)


def _counts(size: int) -> Batch:
    return lambda part: (size, part)
