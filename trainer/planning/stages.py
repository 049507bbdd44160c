"""One stage of a pipeline before its layers are known: its devices and place, and its tables of time and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from hetctl.trainer.planning.costs import MODES, NOTHING, PLAIN, LayerCosts, Mode, usable_bytes
from hetctl.trainer.planning.partition import Floats, StageTable
from hetctl.trainer.planning.pools import Rates

Sharding = Literal["none", "host", "all"]


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
    """Bytes per second towards other replicas: of one rank, and of a stage's ranks together."""

    per_rank: float
    total: float


@dataclass(frozen=True)
class StagePlace:
    """Where in its pipeline a stage stands, and what its micro-batches are."""

    first: bool
    last: bool
    samples: int  # of a micro-batch, on the fullest rank
    held: int  # micro-batches whose activations are alive at once
    ratio: float = 1.0  # of a micro-batch's round trip over its beats, covered by so many forwards in flight
    wait_s: float = 0.0  # transfers of that round trip, over the forwards in flight
    sync: SyncRate | None = None  # towards other replicas; None: there are none
    replicas: int = 1


@dataclass(frozen=True)
class Choice:
    """One way to run a stage within memory: what is computed again, offloaded, sharded."""

    mode: Mode
    shards: int


@dataclass(frozen=True, eq=False)
class StageCosts:
    """A stage's tables and the choices their rows stand for. Memory is bytes per rank, fitting or not."""

    table: StageTable
    memory: Floats  # [choices, layers + 1]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Means:
    """What the planner may do about memory and gradient sums (abilities and the recipe's wishes)."""

    modes: tuple[Mode, ...] = MODES
    shardings: tuple[Sharding, ...] = ("none", "host", "all")
    overlap: bool = True  # gradient sums run while backward does


def share(micro_batch_size: int, width: int) -> int:
    """Samples of a micro-batch on the fullest rank of a stage."""
    return -(-micro_batch_size // width)


class StageBook:
    """Tables of stages, each made once."""

    def __init__(self, costs: LayerCosts, means: Means) -> None:
        self.costs, self.means = costs, means
        self._known: dict[tuple[StageSite, StagePlace], StageCosts] = {}

    def of(self, site: StageSite, place: StagePlace) -> StageCosts:
        """The tables of a stage."""
        key = (site, place)
        found = self._known.get(key)
        if found is not None:
            return found
        if place.wait_s or place.ratio != 1.0:  # waiting changes nothing else
            bare = self.of(site, replace(place, ratio=1.0, wait_s=0.0))
            found = replace(bare, table=replace(bare.table, ratio=place.ratio, wait=place.wait_s))
        else:
            found = stage_costs(self.costs, site, place, self.means)
        self._known[key] = found
        return found


class Linear(NamedTuple):
    """`fixed + layers * each`: every cost of a stage is linear in its layers, since all blocks are alike."""

    fixed: float
    each: float

    def at(self, layers: float) -> float:
        return self.fixed + layers * self.each


class Coefficients(NamedTuple):
    """A stage's costs under one choice: seconds per micro-batch, seconds once a step, bytes per rank."""

    forward: Linear
    backward: Linear
    sums: Linear  # gradient sums, all of them
    update: Linear
    memory: Linear
    hidden: float  # of the sums, per layer, what backward hides

    def exposed(self, layers: float) -> float:
        """Gradient sums that the last micro-batch's backward does not hide."""
        sums = self.sums.at(layers)
        if not self.hidden:
            return sums
        return max(sums / max(layers, 1), sums - layers * self.hidden)


def coefficients(costs: LayerCosts, site: StageSite, place: StagePlace, choice: Choice, means: Means) -> Coefficients:
    """What a stage costs: compute, the collectives that compute cannot hide, state, activations, buffers."""
    return _Stage(costs, site, place, means).under(choice)


class _Stage:
    """What all choices of one stage have in common, worked out once: the search asks for a dozen of each."""

    def __init__(self, costs: LayerCosts, site: StageSite, place: StagePlace, means: Means) -> None:
        self.costs, self.site, self.place, self.means = costs, site, place, means
        tensor = site.tensor
        self.plain = costs.block(site.rates, place.samples, tensor=tensor)
        extras = costs.embedding(site.rates, place.samples, tensor=tensor) if place.first else NOTHING
        self.extras = extras + costs.head(site.rates, place.samples, tensor=tensor) if place.last else extras
        self.fixed = costs.stage_parameters(0, first=place.first, last=place.last) / tensor
        self.each = costs.block_parameters_on(tensor)
        self.kept = costs.activation_bytes(place.samples, tensor=tensor)
        self.buffers = (2 + place.held) * costs.boundary_bytes(place.samples)
        self._sharded: dict[int, tuple[float, float, float]] = {}

    def under(self, choice: Choice) -> Coefficients:
        """The costs under one choice."""
        row = self.row(choice)
        forward, backward, sums, update, memory = (Linear(*p) for p in zip(row[::2], row[1::2], strict=True))
        hidden = backward.each if self.means.overlap else 0.0
        return Coefficients(forward, backward, sums, update, memory, hidden)

    def row(self, choice: Choice) -> tuple[float, ...]:
        """The costs under one choice as plain numbers: `fixed` and `each` of a Coefficients' lines, in their order."""
        costs, site, place, mode, shards = self.costs, self.site, self.place, choice.mode, choice.shards
        block = costs.block(site.rates, place.samples, tensor=site.tensor, mode=mode, plain=self.plain)
        forward, backward = block.forward, block.backward
        gather, scatter, sums = self._over(shards)
        if shards > 1:
            forward, backward = max(forward, gather), max(backward, gather + scatter)
        update = costs.update(site.rates, 1.0, offload=mode.offload) / shards
        state = costs.state_bytes_per_parameter(shards=shards, offload=mode.offload)
        plain = mode.recompute == "none" and not mode.activations
        held = self.kept if plain else costs.activation_bytes(place.samples, tensor=site.tensor, mode=mode)
        working = costs.working_bytes(
            place.samples, tensor=site.tensor, mode=mode, last=place.last, shards=shards, kept=self.kept
        )
        fixed, each = self.fixed, self.each
        time = (self.extras.forward, forward, self.extras.backward, backward)
        once = (fixed * sums, each * sums, fixed * update, each * update)
        return (*time, *once, fixed * state + self.buffers + working, each * state + place.held * held)

    def _over(self, shards: int) -> tuple[float, float, float]:
        """Seconds to gather a block's weights, to scatter its gradients, and to sum those of a parameter."""
        if shards not in self._sharded:
            numbers, site = self.costs.numbers, self.site
            gather = gather_seconds(site, shards, self.each * numbers.compute)
            scatter = gather_seconds(site, shards, self.each * numbers.gradients)
            self._sharded[shards] = gather, scatter, sync_seconds(self.costs, site, self.place, shards)
        return self._sharded[shards]


def sync_seconds(costs: LayerCosts, site: StageSite, place: StagePlace, shards: int) -> float:
    """Seconds per parameter, once a step: gradients summed over copies inside the stage, then with other replicas."""
    gradients = costs.numbers.gradients
    seconds = 2 * gradients / shards * gather_seconds(site, site.width // shards, 1.0)
    if place.sync is not None:
        # islands exchange shards: each rank carries its part of the stage's gradients
        part = gradients / site.width
        rate = min(place.sync.per_rank, place.sync.total / (site.width * site.tensor))
        seconds += 2 * (place.replicas - 1) / place.replicas * part / rate
    return seconds


def gather_seconds(site: StageSite, ranks: int, total: float) -> float:
    """Seconds to gather (or reduce-scatter) `total` bytes over `ranks` ranks of a stage.

    FACTS: half of `2(g-1)/g M/B_intra + 2(n-1)/n M/(k B_nic)`, rings inside hosts and one per NIC across.
    """
    inside = min(ranks, site.shares_per_host)
    hosts = -(-ranks // inside)
    seconds = (inside - 1) / inside * total / site.rates.native_bytes_per_s
    return seconds + (hosts - 1) / hosts * total / (inside * site.rates.nic_bytes_per_s)


def stage_costs(costs: LayerCosts, site: StageSite, place: StagePlace, means: Means) -> StageCosts:
    """Tables for 0..all layers. Rows that another row beats everywhere are left out."""
    usable = usable_bytes(site.rates)
    choices: list[Choice] = []
    rows: list[tuple[float, ...]] = []
    stage = _Stage(costs, site, place, means)
    for shards in dict.fromkeys(site.shards(s) for s in means.shardings):
        for mode in means.modes:
            choice = Choice(mode, shards)
            row = stage.row(choice)
            fixed, each = row[-2:]  # bytes
            if fixed + each <= usable:
                choices.append(choice)
                rows.append(row)
            if mode == PLAIN and fixed + each * costs.shape.layers <= usable:
                break  # nothing is faster than to save no memory
    layers = np.arange(costs.shape.layers + 1, dtype=np.float64)
    if not rows:
        nothing = np.full((1, len(layers)), np.inf)
        return StageCosts(StageTable(nothing, nothing, place.ratio, place.wait_s), nothing, (Choice(MODES[0], 1),))
    numbers = np.array(rows).T  # of all choices: fixed and each of forward, backward, sums, update, memory
    forward, backward, sums, update, memory = numbers[::2, :, None] + numbers[1::2, :, None] * layers
    fits = memory <= usable
    if means.overlap:
        sums = np.maximum(sums / np.maximum(layers, 1), sums - numbers[3][:, None] * layers)
    beat = np.where(fits, forward + backward, np.inf)
    end = np.where(fits, sums + update, np.inf)
    kept = _undominated(beat, end)
    table = StageTable(beat[kept], end[kept], place.ratio, place.wait_s)
    return StageCosts(table, memory[kept], tuple(choices[i] for i in kept))


def _undominated(beat: Floats, end: Floats) -> list[int]:
    """Rows that no other row beats (or equals, coming earlier) for every number of layers."""
    order = np.arange(len(beat))
    no_worse = ((beat[:, None] <= beat[None]) & (end[:, None] <= end[None])).all(axis=2)
    equal = no_worse & no_worse.T
    beats = no_worse & ~(equal & (order[:, None] >= order[None, :]))
    return [int(i) for i in np.flatnonzero(~beats.any(axis=0))]
