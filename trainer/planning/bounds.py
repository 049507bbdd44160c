"""Lower bounds on a pipeline's step time for many arrangements at once, so that few need the exact split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetctl.trainer.planning.arrange import Batching
from hetctl.trainer.planning.partition import Floats, StageTable, Whole
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import StageBook, StagePlace, share

GRID = 1024  # thresholds tried: the bound is loose by their ratio at most
NEAR = 0.8  # of the limit: from here on thresholds are dense


@dataclass(frozen=True, eq=False)
class UseBound:
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

    def __init__(self, problem: Problem, book: StageBook) -> None:
        self.problem, self.book = problem, book
        self._known: dict[tuple[PoolUse, int, int, float], UseBound | None] = {}

    def of(self, use: PoolUse, batching: Batching, *, waits: bool) -> UseBound | None:
        """The bound of a use, from a stage in the middle. None when not one layer fits.

        `waits`: plain 1F1B is the only schedule that will be tried, so every stage but the pool's last waits for
        a boundary inside the pool.
        """
        payload = self.problem.costs.boundary_bytes(batching.micro_batch_size)
        hop = self.problem.lanes.hop_seconds(use, use, payload) if use.stages > 1 else 0.0
        wait = hop if waits and use.stages > 2 else 0.0  # two hops, shared by two micro-batches in flight at least
        samples = share(batching.micro_batch_size, use.width)
        key = (use, samples, batching.micro_batches, wait)
        if key not in self._known:
            self._known[key] = self._make(use, samples, batching.micro_batches, wait)
        found = self._known[key]
        return None if found is None else replace(found, hops=2 * (use.stages - 1) * hop)

    def _make(self, use: PoolUse, samples: int, count: int, wait: float) -> UseBound | None:
        """Without the sums across replicas, so that one bound serves every grouping."""
        costs = self.problem.costs
        depth = min((use.stages + 1) // 2, count) if self.problem.forwards_ahead is None else 1

        def table(held: int, wait: float) -> StageTable:
            return self.book.of(use.site, StagePlace(False, False, samples, held, 1.0, wait)).table

        shallow = table(1, 0.0)
        load = _least_load(shallow, count)
        if not np.isfinite(load[1]):
            return None
        counts = np.arange(1, len(load))
        return UseBound(
            use=use,
            load=load,
            deep=_least_load(table(depth, wait), count),
            block=float((shallow.beat[:, 1:].min(axis=0) / counts).min()),
            head=costs.head(use.pool.rates, samples, tensor=use.tensor).both,
            embedding=costs.embedding(use.pool.rates, samples, tensor=use.tensor).both,
            least_load=float((load[1:] / counts).min()),
            hops=0.0,
        )


def _least_load(table: StageTable, micro_batches: int) -> Floats:
    load = table.load(micro_batches).min(axis=0)
    load[0] = 0.0
    return np.asarray(np.minimum.accumulate(load[::-1])[::-1])


def lower_bounds(
    options: Sequence[Sequence[UseBound]], layers: int, *, micro_batches: int, stages: int | None, limit: float
) -> tuple[Whole, Floats]:
    """(combinations [n, pools] as indices into each pool's options, bounds [n]) below the limit, fastest first.

    The bound: enough layers must find room under the slowest stage's time, and every stage holds a layer.
    Combinations without room, with more stages than layers or other than the pinned number are left out.
    """
    shape = tuple(len(o) for o in options)
    combos: Whole = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
    depth = _gather([[float(b.use.stages) for b in o] for o in options], combos, "sum")
    fill = _fill(options, combos, depth, layers)
    # whatever the split, a stage's load is at least proportional to its layers
    flow = _gather([[b.use.stages / max(b.least_load, 1e-15) for b in o] for o in options], combos, "sum")
    keep = (depth <= layers if stages is None else depth == stages) & (fill + layers / flow < limit)
    combos, fill = combos[:, keep], fill[keep]
    if not combos.shape[1]:
        return combos.T, np.zeros(0)
    grid = _grid(options, micro_batches, limit)
    rooms = [np.stack([_room(b, grid) for b in o]) for o in options]
    losses = [np.stack([_head_loss(b, grid, micro_batches) for b in o]) for o in options]
    slowest, possible = _first_with_room(rooms, losses, combos, layers, grid)
    bounds = (fill + slowest)[possible]
    order = np.argsort(bounds, kind="stable")
    order = order[: int(np.searchsorted(bounds[order], limit))]
    return combos[:, possible[order]].T, bounds[order]


def _fill(options: Sequence[Sequence[UseBound]], combos: Whole, depth: Floats, layers: int) -> Floats:
    """Least seconds of one micro-batch through all stages and back."""
    fill = _gather([[b.use.stages * b.block for b in o] for o in options], combos, "sum")
    fill += (layers - depth) * _gather([[b.block for b in o] for o in options], combos, "min")
    fill += _gather([[b.head for b in o] for o in options], combos, "min")
    fill += _gather([[b.hops for b in o] for o in options], combos, "sum")
    return fill + _gather([[b.embedding for b in o] for o in options], combos, "min")


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


def _room(bound: UseBound, grid: Floats) -> Floats:
    """Layers that all stages of a use could hold under each threshold."""
    deep = bound.use.stages - bound.depth + 1  # stages that hold `depth` or more
    shallow = np.searchsorted(bound.load, grid, side="right") - 1
    deeper = np.searchsorted(bound.deep, grid, side="right") - 1
    return np.asarray((bound.use.stages - deep) * shallow + deep * deeper, dtype=np.float64)


def _head_loss(bound: UseBound, grid: Floats, micro_batches: int) -> Floats:
    """Layers that a stage of a use loses by holding the LM head, under each threshold."""
    whole = np.searchsorted(bound.load, grid, side="right")
    left = np.searchsorted(bound.load, grid - (micro_batches - 1) * bound.head, side="right")
    return np.asarray(whole - np.maximum(left, 1), dtype=np.float64)


def _first_with_room(
    rooms: Sequence[Floats], losses: Sequence[Floats], combos: Whole, layers: int, grid: Floats
) -> tuple[Floats, Whole]:
    """(the largest threshold without room, where room exists at all) per combination, by bisection."""
    count = combos.shape[1]
    low = np.zeros(count, dtype=np.int64)
    high = np.full(count, len(grid), dtype=np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, len(grid) - 1)
        room = rooms[0][combos[0], middle]
        loss = losses[0][combos[0], middle]
        for part, lost, index in zip(rooms[1:], losses[1:], combos[1:], strict=True):
            room = room + part[index, middle]
            loss = np.minimum(loss, lost[index, middle])
        enough = room - loss >= layers
        active = low < high
        high = np.where(active & enough, middle, high)
        low = np.where(active & ~enough, middle + 1, low)
    possible = np.flatnonzero(low < len(grid))
    below: Floats = np.where(low > 0, grid[np.maximum(low - 1, 0)], 0.0)
    return below, possible


def _gather(values: Sequence[Sequence[float]], combos: Whole, how: str) -> Floats:
    parts: list[Floats] = [np.asarray(v, dtype=np.float64)[combos[i]] for i, v in enumerate(values)]
    total: Floats = parts[0].copy()
    for part in parts[1:]:
        total = total + part if how == "sum" else np.minimum(total, part)
    return total
