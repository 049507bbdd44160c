"""What holders of a layer share out: weights and gradients too where memory is short, else optimiser state only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hetctl.comm.contract.plan import Replica, Stage
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.costs import LayerCosts

SPARE_BYTES = 4 * GiB  # beyond what the plan predicts, before whole weights are kept: context, fragments

Asked = Literal["auto", "optimizer", "all", "replicas"]


def more_bytes(whole: float, shards: int) -> int:
    """Bytes that a rank holds more when its weights and gradients, so many bytes, stay whole."""
    return int(whole * (1 - 1 / shards))


def has_room(predicted: int, more: int, limit: int | None) -> bool:
    """Whether a device that is predicted to hold so much can hold more; unknown limits bind nobody."""
    return limit is None or predicted + more + SPARE_BYTES <= limit


def with_whole(
    replicas: Sequence[Replica],
    memory: Sequence[int],
    limits: Sequence[int | None],
    *,
    costs: LayerCosts,
    asked: Asked,
) -> tuple[tuple[Replica, ...], tuple[int, ...], bool]:
    """The replicas with what each sharded stage keeps whole decided, and every rank's memory with that in it.

    Last, whether optimiser state is shared out over all replicas: asked for, or where all of it fits so.
    """
    stages, more = _stages(replicas), _more(replicas, costs)
    over = asked in ("auto", "replicas") and len(replicas) > 1 and _cut_alike_somewhere(stages)
    if over:
        held = over_replicas(replicas, _with(memory, more, costs), costs)
        fits = all(held[r] <= memory[r] or has_room(held[r], 0, limits[r]) for stage in stages for r in stage.ranks)
        over = asked == "replicas" or fits
    if not over:
        more = {
            ranks: extra
            for ranks, extra in more.items()
            if asked in ("optimizer", "replicas")
            or (asked == "auto" and all(has_room(memory[r], extra, limits[r]) for r in ranks))
        }
        held = _with(memory, more, costs)
    decided = (
        replace(r, stages=tuple(replace(s, whole=s.ranks in more if s.shards > 1 else None) for s in r.stages))
        for r in replicas
    )
    return tuple(decided), held, over


def _cut_alike_somewhere(stages: Sequence[Stage]) -> bool:
    """Whether the holders of any layer cut it alike: they can share out its state."""
    layers = {layer for stage in stages for layer in range(*stage.layers)}
    holders = ([s for s in stages if s.layers[0] <= layer < s.layers[1]] for layer in layers)
    return any(len({s.tensor_parallel for s in of}) == 1 for of in holders)


def _stages(replicas: Sequence[Replica]) -> list[Stage]:
    return [stage for replica in replicas for stage in replica.stages]


def _more(replicas: Sequence[Replica], costs: LayerCosts) -> dict[tuple[int, ...], int]:
    """By the ranks of sharded stages: what each holds more when all stages that the same ranks hold stay whole."""
    more, n = dict[tuple[int, ...], int](), costs.value_bytes
    for stage in _stages(replicas):
        if stage.shards > 1:
            trained, frozen = held_on(costs, stage)
            whole = trained * (n.compute + n.gradients) + frozen
            more[stage.ranks] = more.get(stage.ranks, 0) + more_bytes(whole, stage.shards)
    return more


def _with(memory: Sequence[int], more: Mapping[tuple[int, ...], int], costs: LayerCosts) -> tuple[int, ...]:
    """What ranks hold with so much more; where whole weights are asked for the search has charged them."""
    held = list(memory)
    for ranks, extra in more.items() if not costs.whole else ():
        for rank in ranks:
            held[rank] += extra
    return tuple(held)


def over_replicas(replicas: Sequence[Replica], memory: Sequence[int], costs: LayerCosts) -> tuple[int, ...]:
    """Every rank's memory when all holders of a layer share out its masters and moments, not only those of a stage.

    Layers that some holders cut into tensor shards and others do not, or otherwise, stay as they are. Embedding and
    head are counted as if they had as many holders as the stage's blocks on average.
    """
    held, value_bytes = list(memory), costs.value_bytes
    state = value_bytes.optimizer + (value_bytes.weights if value_bytes.copy else 0)
    every = _stages(replicas)
    for stage in every:
        for rank in stage.ranks if stage.depth and not stage.offload else ():
            held[rank] -= int(held_on(costs, stage)[0] * state * spared_layers(every, stage) / stage.depth)
    return tuple(held)


def spared_layers(every: Sequence[Stage], stage: Stage) -> float:
    """How much less state a rank of a stage holds where all holders share it out, counted in layers' whole state."""
    spared = 0.0
    for layer in range(*stage.layers):
        holders = [s for s in every if s.layers[0] <= layer < s.layers[1]]
        if len({s.tensor_parallel for s in holders}) == 1:
            spared += 1 / stage.shards - 1 / sum(s.width for s in holders)
    return spared


def held_on(costs: LayerCosts, stage: Stage) -> tuple[float, float]:
    """Of a stage on one of its ranks, before it is shared out: (trained parameters, bytes of the frozen ones)."""
    (first, past), tensor = stage.layers, stage.tensor_parallel
    ends = costs.stage_parameters(0, first=first == 0, last=past == costs.shape.layers) / tensor
    trained, frozen = ((past - first) * of(tensor) for of in (costs.trained_on, costs.frozen_bytes_on))
    return (trained, frozen + ends * costs.value_bytes.compute) if costs.frozen else (trained + ends, 0.0)
