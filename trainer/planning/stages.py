"""One stage of a pipeline before its layers are known: its devices and place, and its tables of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import inf
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from hetctl.trainer.planning.costs import MODES, NOTHING, PLAIN, LayerCosts, Mode, ValueBytes, usable_bytes
from hetctl.trainer.planning.partition import Floats, Splits, StageTable, undominated
from hetctl.trainer.planning.pools import RING_REACHED, Rates
from hetctl.trainer.planning.simulate import StageTimes

Sharding = Literal["none", "host", "all"]
SHARDINGS: tuple[Sharding, ...] = ("none", "host", "all")
TINY = 1e-30
SPLITS = 4096  # stages together whose splits are remembered: some MiB
Value = TypeVar("Value", float, Floats)


@dataclass(frozen=True)
class StageSite:
    """The devices of a stage: `width` sample shares of `tensor` GPUs each, `per_host` such GPUs on one host."""

    rates: Rates
    width: int
    tensor: int = 1
    per_host: int = 1
    copies: int = 1  # replicas that share this width; state is sharded inside each

    @cached_property
    def shares_per_host(self) -> int:
        """Sample shares that one host holds."""
        return max(1, min(self.width, self.per_host // self.tensor))

    def shards(self, sharding: Sharding) -> int:
        """How many ranks one copy of the stage's state is spread over."""
        if sharding == "none":
            return 1
        if sharding == "all":
            return self.width // self.copies
        most = min(self.shares_per_host, self.width // self.copies)
        return max(d for d in range(1, most + 1) if (self.width // self.copies) % d == 0)


class SyncRate(NamedTuple):
    """Bytes per second towards other replicas: of one rank, of a host's ranks, and of a stage's ranks together."""

    per_rank: float
    per_host: float
    total: float
    hidden: float  # of sums beside a pass, what that does not pay for: all where none are over a bridge
    launching_s: float = inf  # of a block's pass beside them: a longer one pays for nothing


NOTHING_OUTSIDE = SyncRate(inf, inf, inf, 1.0)


@dataclass(frozen=True)
class StagePlace:
    """Where in its pipeline a stage stands, and what its micro-batches are."""

    first: bool
    last: bool
    samples: int  # of a micro-batch, on the fullest rank
    held: int  # micro-batches whose activations are alive at once
    waits: bool = False  # for backwards, since not all micro-batches may be in flight
    trip_s: float = 0.0  # transfers of a micro-batch from here to the last stage and back
    sync: SyncRate | None = None  # towards other replicas; None: there are none
    replicas: int = 1


@dataclass(frozen=True)
class MemoryChoice:
    """One way to run a stage within memory: what is computed again, offloaded, sharded."""

    mode: Mode
    shards: int


@dataclass(frozen=True, eq=False)
class StageCosts:
    """A stage's table and the choices its rows stand for."""

    table: StageTable
    choices: tuple[MemoryChoice, ...]
    every: Coefficients[Floats]
    rows: tuple[tuple[int, int], ...]  # where in `every` each row is: shards, mode
    weights: float

    @cached_property
    def way(self) -> Callable[[int], Coefficients[float]]:
        """(row) -> what its choice costs, each worked out once."""
        return cache(lambda row: self.every.one(*self.rows[row], weights=self.weights))

    @cached_property
    def times(self) -> Callable[[int, int], StageTimes]:
        """(row, layers) -> what the simulator is told of the stage, each worked out once."""
        return cache(lambda row, layers: self.way(row).times(layers))

    @cached_property
    def fastest(self) -> Callable[[int], list[int | None]]:
        """(micro-batches) -> the fastest row for 0, 1, .. layers, None where nothing fits; each worked out once."""
        return cache(self._fastest)

    def _fastest(self, micro_batches: int) -> list[int | None]:
        seconds = micro_batches * self.table.beat + self.table.end
        fits = np.isfinite(seconds.min(axis=0))
        return [int(row) if fit else None for row, fit in zip(seconds.argmin(axis=0), fits, strict=True)]


def share(micro_batch_size: int, width: int) -> int:
    """Samples of a micro-batch on the fullest rank of a stage."""
    return -(-micro_batch_size // width)


class StageCostCache:
    """Tables of stages, each made once."""

    def __init__(self, costs: LayerCosts, modes: tuple[Mode, ...]) -> None:
        self.costs, self.modes = costs, modes
        self.of = cache(self._of)
        self.splits = lru_cache(SPLITS)(self._splits)

    def _of(self, site: StageSite, place: StagePlace) -> StageCosts:
        """The tables of a stage."""
        if place.waits:  # it changes nothing else
            bare = self.of(site, replace(place, waits=False, trip_s=0.0))
            return replace(bare, table=replace(bare.table, in_flight=place.held, trip_s=place.trip_s))
        return stage_costs(self.costs, site, place, self.modes)

    def _splits(self, stages: tuple[StageCosts, ...]) -> Splits:
        """How layers can be split among these stages."""
        return Splits([stage.table for stage in stages], self.costs.shape.layers)


@dataclass(frozen=True, eq=False)
class LinearCost(Generic[Value]):
    """`fixed + layers * each`: every cost of a stage is linear in its layers, since all blocks are alike."""

    fixed: Value
    each: Value

    def at(self, layers: Value | float) -> Value:
        return self.fixed + layers * self.each


@dataclass(frozen=True, eq=False)
class Coefficients(Generic[Value]):
    """A stage's costs: seconds per micro-batch, seconds once a step, bytes per rank. Under one choice, or as arrays."""

    forward: LinearCost[Value]
    backward: LinearCost[Value]
    sums: LinearCost[Value]  # gradient sums, all of them
    update: LinearCost[Value]
    memory: LinearCost[Value]
    host: LinearCost[Value]  # bytes per rank in its host's memory
    bridged: Value  # of the gradient sums' seconds, those over a bridge
    returned: Value  # of the gradient sums' seconds, those of weights that come back beside the next forward
    hiding_cost: Value  # of those seconds that a pass hides, what it takes longer
    launching_s: float = inf  # of a block's pass: a longer one loses nothing
    weights: float = 0.0  # seconds of a layer's backward that a schedule may put off

    def exposed(self, layers: Value | float) -> Value:
        """Gradient sums that the last micro-batch's backward does not hide, weights that come back and the next forward
        does not, and what hiding the others costs these passes."""
        sums = self.sums.at(layers)
        back: Value = self.returned * sums
        return self._beside(sums - back, layers, self.backward) + self._beside(back, layers, self.forward)

    def _beside(self, seconds: Value, layers: Value | float, computing: LinearCost[Value]) -> Value:
        """What so many seconds of sums beside a pass add to it."""
        left: Value = np.maximum(seconds / np.maximum(layers, 1), seconds - layers * computing.each)
        each: Value = self.hiding_cost * (seconds - left) / np.maximum(layers, 1)
        slower: Value = np.minimum(each, np.maximum(0.0, self.launching_s - computing.each))
        return left + layers * slower

    def one(self: Coefficients[Floats], shards: int, mode: int, *, weights: float) -> Coefficients[float]:
        """Of one site's arrays those under one choice, by its place in them."""

        def chosen(v: Floats) -> float:
            return float(v[0, min(shards, v.shape[1] - 1), min(mode, v.shape[2] - 1), 0])

        def at(line: LinearCost[Floats]) -> LinearCost[float]:
            return LinearCost(chosen(line.fixed), chosen(line.each))

        return Coefficients(
            at(self.forward),
            at(self.backward),
            at(self.sums),
            at(self.update),
            at(self.memory),
            at(self.host),
            chosen(self.bridged),
            chosen(self.returned),
            chosen(self.hiding_cost),
            self.launching_s,
            weights,
        )

    def times(self: Coefficients[float], layers: int) -> StageTimes:
        """What the simulator is told of a stage with so many layers."""
        forward, backward, update = (line.at(layers) for line in (self.forward, self.backward, self.update))
        sums = float(self.exposed(layers))
        return StageTimes(forward, backward, sums, update, layers * self.weights, sums * self.bridged)


@lru_cache(maxsize=1 << 14)
def coefficients(costs: LayerCosts, site: StageSite, place: StagePlace, choice: MemoryChoice) -> Coefficients[float]:
    """What a stage costs: compute, the collectives that compute cannot hide, state, activations, buffers."""
    found = coefficient_arrays(costs, [site], place, [place.samples], (choice.mode,), [[choice.shards]])
    return found.one(0, 0, weights=costs.weight_gradients(site.rates, place.samples, tensor=site.tensor))


def coefficient_arrays(
    costs: LayerCosts,
    sites: Sequence[StageSite],
    place: StagePlace,
    samples: Sequence[int],
    modes: tuple[Mode, ...],
    shards: Sequence[Sequence[int]],
) -> Coefficients[Floats]:
    """The costs of stages under every choice, as arrays that broadcast to [sites, shards, modes, 1], the last axis for
    layers. The sites have equal rates and stand alike, but for the `samples` of their micro-batches.

    Worked out at once, since the search asks for a dozen choices of thousands of stages.
    """
    rates, compute, gradients = sites[0].rates, costs.value_bytes.compute, costs.value_bytes.gradients
    kinds = [(n, s.tensor) for n, s in zip(samples, sites, strict=True)]
    mode = costs.under(modes, rates, kinds)
    extras = [NOTHING] * len(kinds)
    if place.first:
        extras = [costs.embedding(rates, n, tensor=t) for n, t in kinds]
    if place.last:
        extras = [e + costs.head(rates, n, tensor=t) for e, (n, t) in zip(extras, kinds, strict=True)]
    tensor = column(t for _, t in kinds)
    ends = costs.stage_parameters(0, first=place.first, last=place.last) / tensor
    fixed = 0.0 * ends if costs.frozen else ends
    each, frozen = (column(of(t) for _, t in kinds) for of in (costs.trained_on, costs.frozen_bytes_on))
    buffers = (2 + place.held) * column(costs.boundary_bytes(n) for n, _ in kinds)
    logits = column(costs.logits_bytes(n, tensor=t) if place.last else 0.0 for n, t in kinds)
    gathered = column(costs.gathered_bytes(tensor=t, last=place.last) for _, t in kinds)
    width, inside = column(s.width for s in sites), column(s.shares_per_host for s in sites)
    count = np.array(shards, dtype=np.float64)[:, :, None, None]
    gather = _gather_seconds(rates, inside, count, each * compute + frozen)
    scatter = _gather_seconds(rates, inside, count, each * gradients)
    own, others = _sync_seconds(rates, place, inside, width, tensor, count, costs.value_bytes)
    sums = own + others
    update, state = mode.update / count, mode.state / count
    cut = np.ones_like(count) if costs.whole else count  # of weights and gradients
    state = state + (compute + gradients) * (1 / cut - 1 / count)
    saved = costs.value_bytes.written / width  # a checkpoint's copy, once of each
    on_host = mode.host_state / count + saved
    outside, sync = others / np.maximum(sums, TINY), place.sync or NOTHING_OUTSIDE
    back = compute / costs.value_bytes.exchanged if costs.value_bytes.over_replicas else 0.0
    beside = costs.overlap_cost
    working = np.maximum(mode.working, logits) + np.where(count > 1, gathered, 0.0)
    return Coefficients(
        forward=LinearCost(
            column(e.forward for e in extras), _beside(mode.forward, (1 + costs.referred) * gather, beside)
        ),
        backward=LinearCost(column(e.backward for e in extras), _beside(mode.backward, gather + scatter, beside)),
        sums=LinearCost(fixed * sums, each * sums),
        update=LinearCost(fixed * update, each * update),
        memory=LinearCost(
            fixed * state + (ends - fixed) * compute / cut + buffers + working,
            each * state + frozen / cut + place.held * mode.held,
        ),
        host=LinearCost(fixed * on_host, each * on_host + place.held * mode.host_held),
        bridged=outside * (sync.hidden < 1),
        returned=outside * back,
        hiding_cost=outside * (1 - sync.hidden),
        launching_s=sync.launching_s,
    )


def column(values: Iterable[float]) -> Floats:
    """One value per site, along the first of four axes."""
    return np.array(list(values), dtype=np.float64)[:, None, None, None]


def _beside(compute: Floats, collective: Floats, cost: float) -> Floats:
    """Seconds of computation with a collective beside it."""
    seconds: Floats = np.maximum(compute, collective) + cost * np.minimum(compute, collective)
    return seconds


def _sync_seconds(
    rates: Rates,
    place: StagePlace,
    inside: Floats,
    width: Floats,
    tensor: Floats,
    shards: Floats,
    value_bytes: ValueBytes,
) -> tuple[Floats, Floats]:
    """Seconds per parameter, once a step: gradients summed over copies inside the stage, and with other replicas.

    Where replicas share out the update, what comes back are weights.
    """
    seconds: Floats = 2 * value_bytes.gradients / shards * _gather_seconds(rates, inside, width // shards, 1.0)
    if place.sync is None:
        return seconds, 0 * seconds
    # islands exchange shards: each rank carries its part of what the stage holds
    rate = np.minimum(place.sync.per_rank, place.sync.per_host / (inside * tensor))
    rate = np.minimum(rate, place.sync.total / (width * tensor))
    return seconds, (place.replicas - 1) / place.replicas * (value_bytes.exchanged / width) / rate


def _gather_seconds(rates: Rates, shares_per_host: Floats, ranks: Floats, total: Floats | float) -> Floats:
    """Seconds to gather (or reduce-scatter) `total` bytes over `ranks` ranks of a stage.

    FACTS: half of `2(g-1)/g M/B_intra + 2(n-1)/n M/(k B_nic)`, rings inside hosts and one per NIC across.
    """
    inside = np.minimum(ranks, shares_per_host)
    hosts = -(-ranks // inside)
    seconds: Floats = (inside - 1) / inside * total / rates.native_bytes_per_s
    return seconds + (hosts - 1) / hosts * total / (inside * rates.nic_bytes_per_s * RING_REACHED)


def stage_costs(costs: LayerCosts, site: StageSite, place: StagePlace, modes: tuple[Mode, ...]) -> StageCosts:
    """Tables for 0..all layers. Rows that another row beats everywhere are left out."""
    usable = usable_bytes(site.rates)
    shards = list(dict.fromkeys(site.shards(s) for s in SHARDINGS))
    every = coefficient_arrays(costs, [site], place, [place.samples], modes, [shards])
    layers = np.arange(costs.shape.layers + 1, dtype=np.float64)
    fits = (every.memory.at(layers) <= usable) & (every.host.at(layers) <= site.rates.host_memory_bytes)
    wanted = fits[..., 1]  # one layer at least
    if PLAIN in modes:  # where all layers fit so, nothing is faster than to save no memory
        plain = modes.index(PLAIN)
        wanted[fits[:, :, plain, -1], plain + 1 :] = False
    weights = costs.weight_gradients(site.rates, place.samples, tensor=site.tensor)
    chosen = np.argwhere(wanted)
    if not len(chosen):
        nothing = np.full((1, len(layers)), np.inf)
        return StageCosts(StageTable(nothing, nothing), (MemoryChoice(MODES[0], 1),), every, ((0, 0),), weights)
    beat, end = every.forward.at(layers) + every.backward.at(layers), every.exposed(layers) + every.update.at(layers)
    beat, end = (np.where(fits[wanted], seconds[wanted], np.inf) for seconds in (beat, end))
    kept = undominated(np.concatenate([beat, end], axis=1))
    rows = tuple((s, m) for _, s, m in chosen[kept].tolist())
    choices = tuple(MemoryChoice(modes[m], shards[s]) for s, m in rows)
    return StageCosts(StageTable(beat[kept], end[kept]), choices, every, rows, weights)
