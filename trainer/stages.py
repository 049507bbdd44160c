"""One stage of a pipeline before its layers are known: its devices and place, and its tables of time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetctl.trainer.costs import MODES, NOTHING, LayerCosts, Mode, Seconds, usable_bytes
from hetctl.trainer.partition import Floats, StageTable
from hetctl.trainer.pools import Rates

Sharding = Literal["none", "host", "all"]


@dataclass(frozen=True)
class StageSite:
    """The devices of a stage: `width` sample shares of `tensor` GPUs each, `per_host` such GPUs on one host."""

    rates: Rates
    width: int
    tensor: int = 1
    per_host: int = 1
    copies: int = 1  # replicas that share this width; state is sharded inside each

    @property
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


@dataclass(frozen=True)
class StagePlace:
    """Where in its pipeline a stage stands, and what its micro-batches are."""

    first: bool
    last: bool
    micro_batch_size: int
    held: int  # micro-batches whose activations are alive at once
    wait_s: float = 0.0  # per micro-batch for transfers that the schedule does not hide
    sync_bytes_per_s: float | None = None  # of each rank towards other replicas; None: there are none
    replicas: int = 1


@dataclass(frozen=True)
class Choice:
    """One way to run a stage within memory: what is computed again, offloaded, sharded."""

    mode: Mode
    shards: int


@dataclass(frozen=True)
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
        if found is None:
            found = self._known[key] = stage_costs(self.costs, site, place, self.means)
        return found


def stage_costs(costs: LayerCosts, site: StageSite, place: StagePlace, means: Means) -> StageCosts:
    """Tables for 0..all layers. Rows that another row beats everywhere are left out."""
    counts = np.arange(costs.shape.layers + 1, dtype=np.float64)
    usable = usable_bytes(site.rates)
    rows = []
    for shards in dict.fromkeys(site.shards(s) for s in means.shardings):
        for mode in means.modes:
            choice = Choice(mode, shards)
            memory = memory_bytes(costs, site, place, counts, choice)
            if memory[1] > usable:
                continue
            block, extras = stage_seconds(costs, site, place, choice)
            fits = memory <= usable
            beat = np.where(fits, counts * block.both + extras.both, np.inf)
            end = np.where(fits, end_seconds(costs, site, place, counts, choice, means=means), np.inf)
            rows.append((choice, beat, end, memory))
    if not rows:
        nothing = np.full((1, len(counts)), np.inf)
        return StageCosts(StageTable(nothing, nothing, place.wait_s), nothing, (Choice(MODES[0], 1),))
    kept = _undominated(np.stack([r[1] for r in rows]), np.stack([r[2] for r in rows]))
    rows = [rows[i] for i in kept]
    table = StageTable(np.stack([r[1] for r in rows]), np.stack([r[2] for r in rows]), place.wait_s)
    return StageCosts(table, np.stack([r[3] for r in rows]), tuple(r[0] for r in rows))


def _undominated(beat: Floats, end: Floats) -> list[int]:
    """Rows that no other row beats (or equals, coming earlier) for every number of layers."""
    kept: list[int] = []
    for row in range(len(beat)):
        others = [o for o in range(len(beat)) if o != row]
        beaten = any(
            np.all(beat[o] <= beat[row])
            and np.all(end[o] <= end[row])
            and (o < row or bool(np.any(beat[o] < beat[row])) or bool(np.any(end[o] < end[row])))
            for o in others
        )
        if not beaten:
            kept.append(row)
    return kept


def stage_seconds(costs: LayerCosts, site: StageSite, place: StagePlace, choice: Choice) -> tuple[Seconds, Seconds]:
    """(one block, everything else of the stage) for one micro-batch, collectives that compute cannot hide included."""
    samples = share(place.micro_batch_size, site.width)
    block = costs.block(site.rates, samples, tensor=site.tensor, mode=choice.mode)
    if choice.shards > 1:
        weights = costs.shape.block_parameters / site.tensor
        gather = gather_seconds(site, choice.shards, weights * costs.numbers.compute)
        scatter = gather_seconds(site, choice.shards, weights * costs.numbers.gradients)
        block = Seconds(max(block.forward, gather), max(block.backward, gather + scatter))
    extras = costs.embedding(site.rates, samples) if place.first else NOTHING
    if place.last:
        extras = extras + costs.head(site.rates, samples, tensor=site.tensor)
    return block, extras


def gather_seconds(site: StageSite, ranks: int, total: float) -> float:
    """Seconds to gather (or reduce-scatter) `total` bytes over `ranks` ranks of a stage.

    FACTS: half of `2(g-1)/g M/B_intra + 2(n-1)/n M/(k B_nic)`, rings inside hosts and one per NIC across.
    """
    inside = min(ranks, site.shares_per_host)
    hosts = -(-ranks // inside)
    seconds = (inside - 1) / inside * total / site.rates.native_bytes_per_s
    return seconds + (hosts - 1) / hosts * total / (inside * site.rates.nic_bytes_per_s)


def sync_seconds(costs: LayerCosts, site: StageSite, place: StagePlace, counts: Floats, choice: Choice) -> Floats:
    """Once a step: summing gradients over the copies inside the stage, then with other replicas."""
    gradients = _parameters(costs, place, counts) / site.tensor * costs.numbers.gradients
    held = gradients / choice.shards
    seconds = 2 * held * gather_seconds(site, site.width // choice.shards, 1.0)
    if place.sync_bytes_per_s is not None:
        # islands exchange shards: each rank carries its part of the stage's gradients
        part = gradients / site.width
        seconds = seconds + 2 * (place.replicas - 1) / place.replicas * part / place.sync_bytes_per_s
    return seconds


def end_seconds(
    costs: LayerCosts, site: StageSite, place: StagePlace, counts: Floats, choice: Choice, *, means: Means
) -> Floats:
    """Once a step: the gradient sums that the last micro-batch's backward does not hide, and the optimiser."""
    sums = sync_seconds(costs, site, place, counts, choice)
    if means.overlap:
        block, _ = stage_seconds(costs, site, place, choice)
        last_block = sums / np.maximum(counts, 1)  # its gradients exist only when backward is over
        sums = np.maximum(last_block, sums - counts * block.backward)
    parameters = _parameters(costs, place, counts) / site.tensor / choice.shards
    return sums + costs.update(site.rates, 1.0, offload=choice.mode.offload) * parameters


def memory_bytes(costs: LayerCosts, site: StageSite, place: StagePlace, counts: Floats, choice: Choice) -> Floats:
    """Bytes per rank by number of layers: state, activations in flight, buffers (FACTS: 1F1B memory)."""
    samples = share(place.micro_batch_size, site.width)
    mode, held = choice.mode, place.held
    state = costs.state_bytes_per_parameter(shards=choice.shards, offload=mode.offload)
    activations = held * costs.activation_bytes(samples, tensor=site.tensor, mode=mode)
    buffers = (2 + held) * costs.boundary_bytes(samples)
    working = costs.working_bytes(samples, tensor=site.tensor, mode=mode, last=place.last, shards=choice.shards)
    return _parameters(costs, place, counts) / site.tensor * state + counts * activations + buffers + working


def _parameters(costs: LayerCosts, place: StagePlace, counts: Floats) -> Floats:
    fixed = costs.stage_parameters(0, first=place.first, last=place.last)
    return counts * costs.shape.block_parameters + fixed
