"""Before anything is downloaded: what each way of training a model holds on a device, and the smallest that will do.

Everything is asked of the planner, of clusters that are made for the question.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import DeviceClass, Precision
from hetctl.comm.contract.emulate import GPUS_PER_HOST, SpecIsland, SpecPart, describe_cluster
from hetctl.comm.contract.errors import Infeasible
from hetctl.trainer.planning.hardware import CLASSES, Hardware
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.precision import precision_of
from hetctl.trainer.planning.predicted_step import memory_parts
from hetctl.trainer.planning.would_fit import PLENTY, Asked, rough_plans
from hetctl.trainer.recipe import BatchSection, LoraSection, ParallelismSection, Recipe, usual_samples

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # devices of one class that are asked about; of more than a host's, the first that do


@dataclass(frozen=True)
class Way:
    """What is trained of a model, and the recipe that does so."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Size:
    """The least memory of a device that will do."""

    memory_bytes: int
    classes: tuple[str, ...]  # that have so much: of each vendor the fastest, then the next


@dataclass(frozen=True)
class Enough:
    """How large so many equal devices have to be: to hold everything, or with state or activations on the host."""

    devices: int
    alone: Size | None  # None: no class is large enough
    with_host: Size | None


@dataclass(frozen=True)
class Part:
    """Devices of a plan that do alike; those that hold no layers are idle."""

    island: str
    device_class: str
    layers: int  # on each
    savings: tuple[str, ...]  # what is done about memory
    devices: int
    memory_bytes: int  # predicted, of the fullest
    device_memory_bytes: int  # that each has


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one way of training takes; of known devices also their plan, or why there is none."""

    way: Way
    one_device: Mapping[str, int]  # bytes of each of USES
    smallest: tuple[Enough, ...] = ()
    planning: Planning | None = None
    refused: Infeasible | None = None


def ways(recipe: Recipe) -> tuple[Way, ...]:
    """Of a recipe with adapters: all weights in their place, the same with moments in 8 bits, the adapters, and these
    beside weights of few bits."""
    name, kind = f"LoRA of rank {recipe.lora.rank}", recipe.lora.quantize
    few = replace(recipe, lora=replace(recipe.lora, quantize="nf4"))
    adapters = (Way(name, recipe), Way(f"{name}, nf4", few)) if kind == "none" else (Way(f"{name}, {kind}", recipe),)
    weights = replace(recipe, lora=LoraSection())
    eight = replace(weights, optimizer=replace(weights.optimizer, name="adamw_8bit"))
    smaller = (Way("all weights, adamw_8bit", eight),) if weights.optimizer.name == "adamw" else ()
    return Way("all weights", weights), *smaller, *adapters


def estimated(way: Way, cluster: Cluster) -> Estimate:
    """The plan of a way on a cluster, or what the planner says in its place."""
    one_device = on_one_device(way.recipe, precision_of(cluster, way.recipe))
    try:
        return Estimate(way, one_device, planning=weigh(cluster, way.recipe))
    except Infeasible as error:
        return Estimate(way, one_device, refused=error)


def on_one_device(recipe: Recipe, precision: Precision) -> Mapping[str, int]:
    """Bytes of each of USES on one device that has room for all of it, micro-batches being of one sample."""
    wish, row = recipe.parallelism, replace(CLASSES["h100"], memory_bytes=PLENTY)
    memory = ParallelismSection(
        recompute=wish.recompute, activations=wish.activations, optimizer_state=wish.optimizer_state
    )
    train = replace(recipe.train, precision=precision)
    alone = replace(recipe, train=train, batch=BatchSection(1, 1), parallelism=memory)
    planning = weigh(_devices(row, 1), alone)
    (parts,) = memory_parts(planning.plan, planning.problem.costs)
    assert parts is not None, "what was predicted just now holds its state"
    return parts


def smallest(recipe: Recipe, table: Hardware, *, global_batch: int | None = None) -> tuple[Enough, ...]:
    """For each number of devices how large they have to be, where that is less than for fewer.

    Whether a plan fits equal devices depends on their memory alone, and on their hosts' in proportion to it. Without
    `global_batch` samples are the usual ones of so many devices.
    """
    asked = recipe.train.precision
    able = [row for row in table.values() if row.vendor != "cpu" and (asked == "auto" or row.computes(asked))]
    sizes, found = sorted({row.memory_bytes for row in able}), list[Enough]()
    alone = with_host = len(sizes)
    for count in COUNTS:
        if count > GPUS_PER_HOST and alone < len(sizes):
            break
        sized = replace(recipe, batch=replace(recipe.batch, global_batch=global_batch or usual_samples(count)))
        before = alone, with_host
        alone = _least(_on_devices(sized), able, sizes[:alone], count)
        with_host = _least(sized, able, sizes[: min(alone, with_host)], count)
        if (alone, with_host) != before:
            found.append(
                Enough(count, *(_size(able, sizes[k]) if k < len(sizes) else None for k in (alone, with_host)))
            )
    return tuple(found)


def _on_devices(recipe: Recipe) -> Recipe:
    """The recipe with optimiser state and activations kept on devices, unless something is pinned about them."""
    wish = recipe.parallelism
    state = "device" if wish.optimizer_state == "auto" else wish.optimizer_state
    activations = "device" if wish.activations == "auto" else wish.activations
    return replace(recipe, parallelism=replace(wish, optimizer_state=state, activations=activations))


def _least(recipe: Recipe, able: Sequence[DeviceClass], sizes: Sequence[int], count: int) -> int:
    """The index of the least of these sizes at which so many devices will do; past the last where none does."""

    def fits(size: int) -> bool:
        row = next(row for row in able if row.memory_bytes == size)
        cluster = _devices(row, count)
        return bool(rough_plans(Asked.of(cluster, recipe, None, None).in_one_replica(), cluster))

    return bisect_left(sizes, True, key=fits)


def _devices(row: DeviceClass, count: int) -> Cluster:
    """A described cluster of one class."""
    cluster = describe_cluster([SpecIsland(row.vendor, (SpecPart(row.name, count),))], {row.name: row})
    return replace(cluster, classes=(row,))


def _size(able: Sequence[DeviceClass], size: int) -> Size:
    rows = sorted((row for row in able if row.memory_bytes == size), key=lambda row: -row.sustained_tflops)
    place = {row.name: [r.name for r in rows if r.vendor == row.vendor].index(row.name) for row in rows}
    return Size(size, tuple(sorted(place, key=lambda name: place[name])))


def parts_of(planning: Planning) -> tuple[Part, ...]:
    """Who holds how much of what was planned."""
    plan, predicted = planning.plan, planning.plan.predicted
    assert predicted is not None, "the planner predicts"
    have = {rank: pool.rates.memory_bytes for pool in planning.problem.pools for rank in pool.ranks}
    alike: dict[tuple[str, str, int, tuple[str, ...]], list[int]] = {}
    for rank in plan.ranks:
        held = [] if rank.replica is None else [plan.replicas[rank.replica].stages[s] for s in rank.stages]
        savings = tuple(dict.fromkeys(word for stage in held for word in stage.savings))
        alike.setdefault((rank.island, rank.device_class, sum(s.depth for s in held), savings), []).append(rank.rank)
    return tuple(
        Part(*key, len(ranks), max(predicted.memory_bytes[r] for r in ranks), have[ranks[0]])
        for key, ranks in alike.items()
    )
