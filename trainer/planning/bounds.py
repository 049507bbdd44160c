"""Lower bounds on a pipeline's step time for many arrangements at once, so that few need the exact split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np

from hetctl.trainer.planning.arrange import Batching
from hetctl.trainer.planning.costs import Seconds, usable_bytes
from hetctl.trainer.planning.partition import Floats, Whole, undominated
from hetctl.trainer.planning.pools import Rates
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import SHARDINGS, StagePlace, coefficient_arrays, column, share

GRID = 1024  # thresholds tried: the bound is loose by their ratio at most
TOGETHER = 64  # uses whose bounds are made at once: some MiB
NEAR = 0.8  # of the limit: from here on thresholds are dense
FEW = 16  # times as many as are asked for are bounded first


class UseBound(NamedTuple):
    """The best the stages of one pool use could do, wherever they stand in the pipeline."""

    use: PoolUse
    load: Floats  # [layers + 1], least seconds beyond the first micro-batch, not decreasing; one micro-batch held
    deep: Floats  # the same with half the pool's stages' micro-batches held
    block: float  # least seconds per block and micro-batch
    head: float  # seconds of the LM head
    embedding: float
    least_load: float  # per layer
    hops: float  # seconds to fill and drain the boundaries inside the pool

    @property
    def depth(self) -> int:
        """Micro-batches that `deep` holds: under 1F1B the j-th last stage of a pool holds j at least."""
        return (self.use.stages + 1) // 2


class UseBounds:
    """Bounds of pool uses, each made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[_Key, UseBound | None] = {}
        self._choices: dict[_Place, _Choices] = {}
        self._seconds = cache(_seconds)  # of the LM head or the embedding

    def of(self, options: Sequence[Sequence[PoolUse]], batching: Batching, *, waits: bool) -> list[list[UseBound]]:
        """By pool the bounds of those of its uses that fit at least one layer, from a stage in the middle.

        `waits`: plain 1F1B is the only schedule that will be tried, so every stage but the pool's last waits for
        a boundary inside the pool.
        """
        payload = self.problem.costs.hop_bytes(batching.micro_batch_size)
        keys = [[self._key(use, batching, payload, waits) for use in uses] for uses in options]
        missing = [key for of_pool in keys for key in of_pool if key not in self._known]
        self._known.update(zip(missing, self._make(missing) if missing else (), strict=True))
        known = ([self._known[key] for key in of_pool] for of_pool in keys)
        return [[bound for bound in of_pool if bound is not None] for of_pool in known]

    def _key(self, use: PoolUse, batching: Batching, payload: float, waits: bool) -> _Key:
        hop = self.problem.links.hop_seconds(use, use, payload) if use.stages > 1 else 0.0
        wait = hop if waits and use.stages > 2 else 0.0  # two hops, over two micro-batches in flight at least
        samples, hops = share(batching.micro_batch_size, use.width), 2 * (use.stages - 1) * hop
        return _Key(use, samples, batching.micro_batches, wait, hops)

    def _make(self, keys: Sequence[_Key]) -> list[UseBound | None]:
        costs, every = self.problem.costs, self._choices_of([(k.use, k.samples, self._depth(k)) for k in keys])
        counts, layers = [len(one.beat) for one in every], np.arange(costs.shape.layers + 1, dtype=np.float64)
        further = np.array([k.micro_batches - 1.0 for k in keys])
        rounds = further.repeat(counts) * np.concatenate([one.beat for one in every])
        starts = np.cumsum([0, *counts[:-1]])
        shallow, deep = (
            _least(np.minimum.reduceat(rounds[:, None] * layers + np.concatenate(once), starts))
            for once in ([one.once for one in every], [one.once_deep for one in every])
        )
        deep[:, 1:] += (further * [key.wait for key in keys])[:, None]
        least = (shallow[:, 1:] / layers[1:]).min(axis=1)
        return [
            UseBound(
                use=key.use,
                load=shallow[i],
                deep=deep[i],
                block=every[i].block,
                head=self._seconds(costs.head, key.use.pool.rates, key.samples, key.use.tensor),
                embedding=self._seconds(costs.embedding, key.use.pool.rates, key.samples, key.use.tensor),
                least_load=float(least[i]),
                hops=key.hops,
            )
            if np.isfinite(shallow[i, 1])
            else None
            for i, key in enumerate(keys)
        ]

    def _choices_of(self, places: Sequence[_Place]) -> list[_Choices]:
        missing = dict.fromkeys(place for place in places if place not in self._choices)
        for _, alike in groupby(missing, key=lambda place: place[0].pool):
            of_pool = list(alike)
            for start in range(0, len(of_pool), TOGETHER):
                some = of_pool[start : start + TOGETHER]
                self._choices.update(zip(some, self._new_choices(some), strict=True))
        return [self._choices[place] for place in places]

    def _new_choices(self, places: Sequence[_Place]) -> list[_Choices]:
        """Of one pool, all at once, as arrays [uses, shards, modes, layers + 1]. Without the sums across replicas, so
        that one bound serves every grouping."""
        costs, modes = self.problem.costs, self.problem.modes
        uses, samples, depths = zip(*places, strict=True)
        sites = [use.site for use in uses]
        shards = [[site.shards(s) for s in SHARDINGS] for site in sites]
        every = coefficient_arrays(costs, sites, StagePlace(False, False, 1, 1), samples, modes, shards)
        # a stage in the middle has blocks only: all costs but memory begin at zero
        sums, memory = every.sums.each, every.memory.each
        fixed, usable = every.memory.fixed, usable_bytes(sites[0].rates)
        layers = np.arange(costs.shape.layers + 1, dtype=np.float64)
        beat = every.forward.each + every.backward.each
        deeper = column(depth - 1 for depth in depths)
        more = deeper * costs.under(modes, sites[0].rates, [(n, use.tensor) for use, n, _ in places]).held
        fixed_deep = fixed + deeper * column(costs.boundary_bytes(n) for n in samples)
        fits = fixed + memory * layers <= usable, fixed_deep + (memory + more) * layers <= usable
        # [uses, choices], and [uses, choices, layers + 1] for what fits
        shape = np.broadcast_shapes(beat.shape, *(fit.shape for fit in fits))
        shallow, deep = (np.broadcast_to(fit, shape).reshape(len(places), -1, len(layers)) for fit in fits)
        late = sums - every.backward.each  # sums of a layer that its backward does not hide
        of_choices = [
            np.broadcast_to(part, (*shape[:-1], 1)).reshape(len(places), -1)
            for part in (beat, every.update.each, sums, late)
        ]
        blocks = np.where(shallow[:, :, 1], of_choices[0], np.inf).min(axis=1)
        # what is no less in all that times are made of is beaten everywhere
        kept = undominated(np.stack([*of_choices, -shallow.sum(axis=-1), -deep.sum(axis=-1)], axis=-1))
        beats, update, sums, late = (part[kept][:, None] for part in of_choices)
        once = layers * update + np.maximum(sums, layers * late)
        loads = [np.where(fit[kept], once, np.inf) for fit in (shallow, deep)]
        ends = np.cumsum(kept.sum(axis=1))[:-1]
        rows = zip(*(np.split(part, ends) for part in (beats[:, 0], *loads)), blocks, strict=True)
        return [_Choices(beat, once, deep, float(block)) for beat, once, deep, block in rows]

    def _depth(self, key: _Key) -> int:
        return min((key.use.stages + 1) // 2, key.micro_batches) if self.problem.forwards_ahead is None else 1


class _Key(NamedTuple):
    """What a bound depends on."""

    use: PoolUse
    samples: int  # of a micro-batch, on the fullest rank
    micro_batches: int
    wait: float
    hops: float


_Place = tuple[PoolUse, int, int]  # with so many samples of a micro-batch, so many of which are held by half the stages


class _Choices(NamedTuple):
    """What a stage can do about memory, but for what another choice beats everywhere, whatever the micro-batches."""

    beat: Floats  # [choices], seconds per layer and micro-batch
    once: Floats  # [choices, layers + 1], seconds a step; infinity where it does not fit, one micro-batch held
    once_deep: Floats  # the same for all that are held
    block: float  # least beat of one layer


def _seconds(what: Callable[..., Seconds], rates: Rates, samples: int, tensor: int) -> float:
    return what(rates, samples, tensor=tensor).both


def _least(loads: Floats) -> Floats:
    """[uses, layers + 1]: the least for so many layers or more."""
    loads[:, 0] = 0.0
    return np.minimum.accumulate(loads[:, ::-1], axis=1)[:, ::-1]


def lower_bounds(
    options: Sequence[Sequence[UseBound]],
    layers: int,
    *,
    micro_batches: int,
    stages: int | None,
    limit: float,
    most: int | None = None,
) -> tuple[Whole, Floats]:
    """(combinations [n, pools] as indices into each pool's options, bounds [n]) below the limit, fastest first.

    The bound: enough layers must find room under the slowest stage's time, and every stage holds a layer.
    Combinations without room, with more stages than layers or other than the pinned number are left out; where `most`
    is given, so may be those that this many others are below.
    """
    shape = tuple(len(o) for o in options)
    combos: Whole = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
    depth = _gather([[float(b.use.stages) for b in o] for o in options], combos)
    fill = _fill(options, combos, depth, layers)
    # whatever the split, a stage's load is at least proportional to its layers
    least = fill + layers / _gather([[b.use.stages / max(b.least_load, 1e-15) for b in o] for o in options], combos)
    keep = (depth <= layers if stages is None else depth == stages) & (least < limit)
    combos, fill, least = combos[:, keep], fill[keep], least[keep]
    if not combos.shape[1]:
        return combos.T, np.zeros(0)
    grid = _grid(options, micro_batches, limit)
    held = Rooms(options).held_and_lost(grid, micro_batches)
    if most is not None and len(least) > FEW * most:
        few = np.argpartition(least, FEW * most)[: FEW * most]
        exact = np.maximum(least[few], fill[few] + _slowest(held, combos[:, few], layers, grid))
        limit = min(limit, float(np.nextafter(np.partition(exact, most - 1)[most - 1], np.inf)))
        keep = least < limit
        combos, fill, least = combos[:, keep], fill[keep], least[keep]
    bounds = np.maximum(least, fill + _slowest(held, combos, layers, grid))
    order = np.argsort(bounds, kind="stable")
    order = order[: int(np.searchsorted(bounds[order], limit))]
    return combos[:, order].T, bounds[order]


def _fill(options: Sequence[Sequence[UseBound]], combos: Whole, depth: Floats, layers: int) -> Floats:
    """Least seconds of one micro-batch through all stages and back."""
    fill = _gather([[b.use.stages * b.block for b in o] for o in options], combos)
    fill += (layers - depth) * _gather([[b.block for b in o] for o in options], combos, np.minimum)
    fill += _gather([[b.head for b in o] for o in options], combos, np.minimum)
    fill += _gather([[b.hops for b in o] for o in options], combos)
    return fill + _gather([[b.embedding for b in o] for o in options], combos, np.minimum)


def _grid(options: Sequence[Sequence[UseBound]], micro_batches: int, limit: float) -> Floats:
    """Thresholds on the slowest stage, ascending; dense just below the limit, where precision decides."""
    lowest = min(float(b.load[1]) for o in options for b in o)
    highest = max(float(b.load[np.isfinite(b.load)][-1]) for o in options for b in o)
    highest += (micro_batches - 1) * max(b.head for o in options for b in o)
    lowest, highest = max(lowest, 1e-12), max(highest, 2e-12) * 1.0001
    if not lowest < limit * NEAR < highest:
        return np.geomspace(lowest, highest, GRID)
    top = min(limit, highest)
    coarse = np.geomspace(lowest, limit * NEAR, GRID // 8, endpoint=False)
    return np.concatenate([coarse, np.geomspace(limit * NEAR, top, GRID // 4), [highest]])


class Rooms:
    """How many layers the uses of pools have room for, under each of some thresholds on the slowest stage's time."""

    def __init__(self, options: Sequence[Sequence[UseBound]]) -> None:
        bounds = list(chain.from_iterable(options))
        self._starts = list(accumulate(map(len, options)))[:-1]  # of the second pool's uses, and so on
        self._shallow, self._deep = np.array([b.load for b in bounds]), np.array([b.deep for b in bounds])
        self._head = np.array([[b.head] for b in bounds])
        self._few = np.array([[b.depth - 1.0] for b in bounds])  # stages that hold less than `depth`
        self._many = np.array([[float(b.use.stages)] for b in bounds]) - self._few

    def held(self, grid: Floats) -> list[Floats]:
        """By pool [uses, thresholds]: layers that all stages of a use could hold."""
        return self._held(_within(self._shallow, grid), grid)

    def held_and_lost(self, grid: Floats, micro_batches: int) -> list[tuple[Floats, Floats]]:
        """The same, and [uses, thresholds] of layers that a stage loses by holding the LM head."""
        shallow = _within(self._shallow, grid)
        with_head = _within(self._shallow + (micro_batches - 1) * self._head, grid)
        lost = np.split(shallow - np.maximum(with_head, 1), self._starts)
        return list(zip(self._held(shallow, grid), lost, strict=True))

    def _held(self, shallow: Floats, grid: Floats) -> list[Floats]:
        deep = _within(self._deep, grid)
        return np.split(self._few * (shallow - 1) + self._many * (deep - 1), self._starts)


def _within(loads: Floats, grid: Floats) -> Floats:
    """[uses, thresholds]: how many of a use's loads, [uses, layers + 1], are within each threshold."""
    uses, size = len(loads), len(grid) + 1
    first = grid.searchsorted(loads.ravel()) + np.arange(uses).repeat(loads.shape[1]) * size
    counts = np.bincount(first, minlength=uses * size).reshape(uses, size)[:, :-1]
    return counts.cumsum(axis=1).astype(np.float64)


def _slowest(pools: Sequence[tuple[Floats, Floats]], combos: Whole, layers: int, grid: Floats) -> Floats:
    """The largest threshold without room for all layers per combination, by bisection; infinity where no room is.

    `pools`: what the uses of each pool hold and lose under the thresholds.
    """
    room, loss = zip(*pools, strict=True)
    count = combos.shape[1]
    low = np.zeros(count, dtype=np.int64)
    high = np.full(count, len(grid), dtype=np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(grid) - 1)
        held = reduce(np.add, (part[at, middle] for part, at in zip(room, combos, strict=True)))
        lost = reduce(np.minimum, (part[at, middle] for part, at in zip(loss, combos, strict=True)))
        enough = held - lost >= layers
        active = low < high
        high = np.where(active & enough, middle, high)
        low = np.where(active & ~enough, middle + 1, low)
    below: Floats = np.where(low > 0, grid[np.maximum(low - 1, 0)], 0.0)
    return np.where(low < len(grid), below, np.inf)


def _gather(values: Sequence[Sequence[float]], combos: Whole, how: np.ufunc = np.add) -> Floats:
    """What each combination's options come to, added up (or the least of them)."""
    parts: list[Floats] = [np.array(v, dtype=np.float64)[combos[i]] for i, v in enumerate(values)]
    return reduce(how, parts)
