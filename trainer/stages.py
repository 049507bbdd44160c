"""One stage of a pipeline before its layers are known: its devices and place, and its tables of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.trainer.costs import MODES, NOTHING, LayerCosts, Mode, Seconds, usable_bytes
from hetctl.trainer.partition import Floats, StageTable
from hetctl.trainer.pools import Rates


@dataclass(frozen=True)
class StageSite:
    """The devices of a stage: `width` sample shares of `tensor` GPUs each, `per_host` of these GPUs on one host."""

    rates: Rates
    width: int
    tensor: int = 1
    shards: int = 1
    per_host: int = 1

    @property
    def ranks(self) -> int:
        return self.width * self.tensor


@dataclass(frozen=True)
class StagePlace:
    """Where in its pipeline a stage stands, and what its micro-batches are."""

    first: bool
    last: bool
    in_flight: int  # forwards before the first backward
    micro_batch_size: int
    micro_batches: int
    sync_bytes_per_s: float | None = None  # of each rank towards other replicas; None: there are none
    replicas: int = 1


def share(micro_batch_size: int, width: int) -> int:
    """Samples of a micro-batch on the fullest rank of a stage."""
    return -(-micro_batch_size // width)


def stage_table(
    costs: LayerCosts, site: StageSite, place: StagePlace, *, modes: Sequence[Mode] = MODES
) -> tuple[StageTable, Floats]:
    """The stage's tables for 0..all layers and each mode, and its memory table in bytes (fitting or not)."""
    layers = costs.shape.layers
    counts = np.arange(layers + 1, dtype=np.float64)
    beats, ends, memories = [], [], []
    for mode in modes:
        memory = memory_bytes(costs, site, place, counts, mode=mode)
        fits = memory <= usable_bytes(site.rates)
        block, extras = stage_seconds(costs, site, place, mode=mode)
        beat = counts * block.both + extras.both
        end = end_seconds(costs, site, place, counts, block.backward, mode=mode)
        beats.append(np.where(fits, beat, np.inf))
        ends.append(np.where(fits, end, np.inf))
        memories.append(memory)
    return StageTable(np.stack(beats), np.stack(ends)), np.stack(memories)


def stage_seconds(costs: LayerCosts, site: StageSite, place: StagePlace, *, mode: Mode) -> tuple[Seconds, Seconds]:
    """(one block, everything else of the stage) for one micro-batch, collectives that compute cannot hide included."""
    samples = share(place.micro_batch_size, site.width)
    block = costs.block(site.rates, samples, tensor=site.tensor, mode=mode)
    if site.shards > 1:
        weights = costs.shape.block_parameters / site.tensor
        gather = gather_seconds(site, weights * costs.numbers.compute)
        scatter = gather_seconds(site, weights * costs.numbers.gradients)
        block = Seconds(max(block.forward, gather), max(block.backward, gather + scatter))
    extras = costs.embedding(site.rates, samples) if place.first else NOTHING
    if place.last:
        extras = extras + costs.head(site.rates, samples, tensor=site.tensor)
    return block, extras


def gather_seconds(site: StageSite, total: float) -> float:
    """Seconds to gather (or reduce-scatter) `total` bytes over the shards: rings inside hosts, then across NICs.

    FACTS: half of `2(g-1)/g M/B_intra + 2(n-1)/n M/(k B_nic)`, with one NIC's share per GPU.
    """
    inside = min(site.shards, max(1, site.per_host // site.tensor))
    hosts = -(-site.shards // inside)
    seconds = (inside - 1) / inside * total / site.rates.native_bytes_per_s
    return seconds + (hosts - 1) / hosts * total / (inside * site.rates.nic_bytes_per_s)


def end_seconds(
    costs: LayerCosts, site: StageSite, place: StagePlace, counts: Floats, block_backward: float, *, mode: Mode
) -> Floats:
    """Once a step: the gradient sums that the last micro-batch's backward does not hide, and the optimiser."""
    parameters = _parameters(costs, place, counts) / site.tensor
    gradients = parameters * costs.numbers.gradients
    sums = np.zeros_like(counts)
    copies = site.width // site.shards
    if copies > 1:
        inside = max(1, site.per_host // site.ranks * copies if site.per_host >= site.ranks else site.per_host)
        inside = min(inside, copies)
        hosts = -(-copies // inside)
        held = gradients / site.shards
        sums = 2 * (inside - 1) / inside * held / site.rates.native_bytes_per_s
        sums = sums + 2 * (hosts - 1) / hosts * held / (inside * site.rates.nic_bytes_per_s)
    if place.sync_bytes_per_s is not None:
        # islands exchange shards: each rank carries its part of the stage's gradients
        part = gradients / site.width
        sums = sums + 2 * (place.replicas - 1) / place.replicas * part / place.sync_bytes_per_s
    last_block = sums / np.maximum(counts, 1)  # its gradients exist only when backward is over
    exposed = np.maximum(last_block, sums - counts * block_backward)
    update = costs.update(site.rates, 1.0, offload=mode.offload) * parameters / site.shards
    return exposed + update


def memory_bytes(costs: LayerCosts, site: StageSite, place: StagePlace, counts: Floats, *, mode: Mode) -> Floats:
    """Bytes per rank by number of layers: state, activations in flight, buffers (FACTS: 1F1B memory)."""
    samples = share(place.micro_batch_size, site.width)
    held = min(place.in_flight, place.micro_batches)
    state = costs.state_bytes_per_parameter(shards=site.shards, offload=mode.offload)
    activations = held * costs.activation_bytes(samples, tensor=site.tensor, mode=mode)
    buffers = (2 + held) * costs.boundary_bytes(samples)
    working = costs.working_bytes(samples, tensor=site.tensor, mode=mode, last=place.last, shards=site.shards)
    return _parameters(costs, place, counts) / site.tensor * state + counts * activations + buffers + working


def _parameters(costs: LayerCosts, place: StagePlace, counts: Floats) -> Floats:
    fixed = costs.stage_parameters(0, first=place.first, last=place.last)
    return counts * costs.shape.block_parameters + fixed
