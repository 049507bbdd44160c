"""How a stage's parameters lie in buckets (which share one, in which order), who holds them too, and who shares what.

Every holder of a layer lays its buckets out alike, whatever else its stage holds: only the padding at the end,
which makes equal shards, is a stage's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.plan import Span as LayerSpan
from hetctl.trainer.model.adapters import is_trained
from hetctl.trainer.model.model import EMBEDDING, POSITIONS, StageModel
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import Cut, cut_of, quantised_as
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare
from hetctl.trainer.planning.state_sharding import Asked, has_room, more_bytes
from hetctl.trainer.ranks.groups import Place, ProcessGroups

ALIGN = 128  # elements: every parameter begins where vector loads and compiled kernels like it
BUCKET_ELEMENTS = 8 << 20  # smaller neighbours of a segment share a bucket
Interval = tuple[int, int]
Kind = Literal["trained", "frozen", "quantised"]  # of parameters: a bucket has those of one kind
KINDS: tuple[Kind, ...] = ("trained", "frozen", "quantised")


@dataclass(frozen=True)
class Slot:
    """Where one parameter (or this rank's part of it) lies in its bucket's flat buffers."""

    name: str  # Hugging Face's
    cut: Cut
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is held here."""
        return self.cut.shape

    @property
    def numel(self) -> int:
        return math.prod(self.cut.shape)

    @property
    def past_room(self) -> int:
        """Where the next parameter may begin, on all ranks of a tensor group."""
        return self.first + aligned(self.cut.room)

    @property
    def decays(self) -> bool:
        """Matrices do, vectors (norms, biases) do not; they come first in a bucket."""
        return len(self.cut.whole) >= 2

    def held_of(self, whole: Tensor) -> Tensor:
        """The part of a whole parameter that is held here: a view."""
        return whole.narrow(self.cut.dim, self.cut.low, self.cut.high - self.cut.low)


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket, the same on all holders (but for the parts that tensor groups cut)."""

    key: int  # the first unit in it: 0 embedding, i + 1 block i, layers + 1 norm and head, layers + 2 tied
    units: tuple[int, ...]
    slots: tuple[Slot, ...]
    holders: tuple[int, ...]  # all ranks whose gradients are summed
    mixed: bool = False  # the holders cut parameters in unlike ways

    @property
    def used(self) -> int:
        return self.slots[-1].past_room

    @property
    def edge(self) -> int:
        """Where matrices end and vectors begin."""
        return next((s.first for s in self.slots if not s.decays), self.used)


def layouts_of(models: Sequence[StageModel], plan: Plan, *, rank: int, kind: Kind) -> list[BucketLayout]:
    """The buckets of one kind of a rank's parameters, in layer order; a tied embedding is a bucket of its own, last."""
    shape = models[0].shape
    cuts = {name: cut for name, cut in _cuts(models).items() if _kind_of(name, shape) == kind}
    units = _units(shape, cuts)
    found = []
    for segment in plan.segments:
        if any(m.first <= segment.layers[0] and segment.layers[1] <= m.past_last for m in models):
            holders = next(g for g in segment.groups if rank in g)
            order = [u for u in _units_of_layers(segment.layers, shape) if u in units]
            for group in _grouped(order, units, cuts):
                names = [name for unit in group for name in units[unit]]
                found.append(_layout(group, names, cuts, holders, plan.cuts_unlike(holders)))
    if shape.tied_embeddings and EMBEDDING in cuts:
        holders = next(g for g in plan.tied_groups() if rank in g)
        found.append(_layout((shape.layers + 2,), [EMBEDDING], cuts, holders, plan.cuts_unlike(holders)))
    return found


def _kind_of(name: str, shape: ModelShape) -> Kind:
    if is_trained(name, shape.adapters):
        return "trained"
    return "quantised" if quantised_as(name, shape) else "frozen"


def _cuts(models: Sequence[StageModel]) -> dict[str, Cut]:
    """Parameter -> what this rank holds of it, in layer order."""
    shape, tensor = models[0].shape, models[0].tensor
    names = dict.fromkeys(name for m in models for name in m.named())
    return {name: cut_of(name, shape, degree=tensor.degree, index=tensor.index) for name in names}


def _units(shape: ModelShape, names: Iterable[str]) -> dict[int, list[str]]:
    """Unit -> names of its parameters; a tied embedding is in none."""
    units: dict[int, list[str]] = {}
    for name in names:
        if name == EMBEDDING:
            if not shape.tied_embeddings:
                units.setdefault(0, []).append(name)
        elif name.startswith("model.layers."):
            units.setdefault(int(name.split(".")[2]) + 1, []).append(name)
        elif name == POSITIONS:
            units.setdefault(0, []).append(name)
        else:
            units.setdefault(shape.layers + 1, []).append(name)
    return units


def _units_of_layers(layers: LayerSpan, shape: ModelShape) -> range:
    """The blocks of these layers, the embedding before the first and norm and head after the last."""
    first, past = layers
    return range(first + 1 if first else 0, past + 1 + (past == shape.layers))


def _grouped(order: list[int], units: Mapping[int, list[str]], cuts: Mapping[str, Cut]) -> Iterator[tuple[int, ...]]:
    """Consecutive units in groups of about BUCKET_ELEMENTS (counted whole): all holders of a segment agree."""
    group: list[int] = []
    total = 0
    for unit in order:
        size = sum(math.prod(cuts[name].whole) for name in units[unit])
        if group and total + size > BUCKET_ELEMENTS:
            yield tuple(group)
            group, total = [], 0
        group.append(unit)
        total += size
    if group:
        yield tuple(group)


def _layout(
    units: tuple[int, ...], names: Iterable[str], cuts: Mapping[str, Cut], holders: tuple[int, ...], mixed: bool
) -> BucketLayout:
    slots: list[Slot] = []
    for name in sorted(names, key=lambda n: len(cuts[n].whole) < 2):  # stable: matrices first, each in model order
        slots.append(Slot(name, cuts[name], slots[-1].past_room if slots else 0))
    return BucketLayout(units[0], units, tuple(slots), holders, mixed)


def wholes_of(layout: BucketLayout, gradient: Tensor) -> Tensor:
    """A bucket's gradient in whole parameters: what this rank holds at its place, zeros elsewhere."""
    wholes = gradient.new_zeros(sum(math.prod(s.cut.whole) for s in layout.slots))
    for slot, whole in _whole_views(layout, wholes):
        if slot.cut.contributes:
            slot.held_of(whole).copy_(gradient[slot.first : slot.first + slot.numel].view(slot.shape))
    return wholes


def take_parts(layout: BucketLayout, wholes: Tensor, gradient: Tensor) -> None:
    """The way back: this rank's parts out of whole parameters."""
    for slot, whole in _whole_views(layout, wholes):
        gradient[slot.first : slot.first + slot.numel].view(slot.shape).copy_(slot.held_of(whole))


def _whole_views(layout: BucketLayout, wholes: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    sizes = [math.prod(s.cut.whole) for s in layout.slots]
    for slot, flat in zip(layout.slots, wholes.split(sizes), strict=True):
        yield slot, flat.view(slot.cut.whole)


def aligned(count: int) -> int:
    """So many elements, up to where the next parameter or shard may begin."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True)
class Shards:
    """Which part of every bucket's state this rank keeps, and with whom it forms the whole."""

    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: alone
    copy: tuple[int, ...] = ()  # all ranks that together hold this copy of the stage: the tensor groups of `ranks`

    @property
    def count(self) -> int:
        return len(self.ranks)


def shards_of(plan: Plan, place: Place, groups: ProcessGroups) -> Shards:
    """With whom a rank shares the state of its stage: runs of `shards` neighbours in the stage's order."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree, first = stage.tensor_parallel, place.part // stage.shards * stage.shards
    copy = stage.ranks[first * degree : (first + stage.shards) * degree]
    ranks = copy[place.tensor :: degree]
    return Shards(place.part - first, ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None, copy)


def shards_over(layout: BucketLayout, rank: int, groups: ProcessGroups) -> Shards:
    """The same with all holders of a bucket, in the order of their group: each keeps the state of an equal part."""
    ranks = tuple(sorted(layout.holders))
    return Shards(ranks.index(rank), ranks, groups.reduce_group(ranks) if len(ranks) > 1 else None)


def may_share(plan: Plan, layout: BucketLayout) -> bool:
    """Whether all holders of a bucket can share out its state: the same answer on each of them.

    They cut parameters alike, and the ranks of a tensor group, who add up what several of them hold, keep like parts.
    """
    if layout.mixed:
        return False
    groups = next(g for g in (*(s.groups for s in plan.segments), plan.tied_groups()) if layout.holders in g)
    part = {rank: index for group in groups for index, rank in enumerate(sorted(group))}
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    together = (s.ranks[k : k + s.tensor_parallel] for s in stages for k in range(0, len(s.ranks), s.tensor_parallel))
    return all(len({part[r] for r in ranks if r in part}) <= 1 for ranks in together)


def tensor_share_of(plan: Plan, place: Place, groups: ProcessGroups) -> TensorShare:
    """A rank's place in the tensor group that computes its share of the samples."""
    stage = plan.replicas[place.replica].stages[place.stage]
    degree = stage.tensor_parallel
    if degree == 1:
        return ALONE
    ranks = stage.ranks[place.part * degree : (place.part + 1) * degree]
    return TensorShare(degree, place.tensor, groups.reduce_group(ranks))


def keeps_whole(plan: Plan, place: Place, asked: Asked, *, weights: int, gradients: int) -> bool:
    """Whether a sharded stage shares out optimiser state only: as recipe or plan say, or if all of it, so many bytes
    of `weights` and `gradients`, fits so."""
    stage = plan.replicas[place.replica].stages[place.stage]
    if asked != "auto" or stage.shards == 1:
        return asked != "all"
    if stage.whole is not None or plan.predicted is None:
        return stage.whole is not False
    more, predicted = more_bytes(weights + gradients, stage.shards), plan.predicted.memory_bytes
    return all(has_room(predicted[r], more, plan.ranks[r].memory_bytes) for r in stage.ranks)
