"""The space the planner searches: which pools form which pipelines, in how many stages, how wide, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.stages import StageSite, share

TENSOR_DEGREES = (1, 2, 4, 8)
FEW_COUNTS_FROM = 32  # devices of a pool beyond which only these numbers of stages are tried, each as wide as can be
FEW_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
POWERS_FROM = 256  # devices of a pool beyond which stages are powers of two
POWERS = (1, 2, 4, 8, 16, 32, 64)
EVERY_WIDTH_UP_TO = 6  # devices of a pool
MANY_POOLS = 4  # in one pipeline: from here on not all orders are tried
ALL_WIDTHS_UP_TO = 8  # narrower pools try every useful width, wider ones the two widest


@dataclass(frozen=True)
class PoolUse:
    """How a pipeline uses a pool: so many stages of `width` sample shares of `tensor` GPUs."""

    pool: Pool
    tensor: int
    stages: int
    width: int
    copies: int = 1  # replicas that share the width

    @cached_property
    def site(self) -> StageSite:
        return StageSite(self.pool.rates, self.width, self.tensor, self.pool.per_host, self.copies)

    @property
    def hosts(self) -> int:
        """How many hosts one stage is on."""
        return -(-self.width * self.tensor // self.pool.per_host)

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage: tensor groups are never across hosts, and what is left over on a host stays idle."""
        step = self.tensor
        ranks = [rank for host in self.pool.hosts for rank in host[: len(host) // step * step]]
        size = self.width * step
        return tuple(tuple(ranks[k * size : (k + 1) * size]) for k in range(self.stages))


@dataclass(frozen=True)
class Pins:
    """What the recipe pins; None is free."""

    tensor: int | None = None
    stages: int | None = None  # per replica
    replicas: int | None = None
    order: tuple[str, ...] | None = None  # islands along one pipeline
    every_island: bool = False  # none may stay idle


def pool_uses(pool: Pool, *, layers: int, micro_batch_size: int, pins: Pins, tensors: Sequence[int]) -> list[PoolUse]:
    """Every way to use a pool for micro-batches of this size.

    Small pools try every width. Of larger ones' widths with equal shares only the narrowest and the widest are kept:
    those between differ in nothing but how far state is sharded. The largest are searched on a coarser grid.
    """
    found: dict[PoolUse, None] = {}
    for tensor in tensors:
        if pins.tensor not in (None, tensor):
            continue
        units = pool.units(tensor)
        most = min(units, layers)
        counts = stage_counts(most, pool.size)
        for stages in counts if pins.stages is None else range(1, min(most, pins.stages) + 1):
            widest = min(units // stages, micro_batch_size)
            for width in [widest] if pool.size > FEW_COUNTS_FROM else _widths(widest, micro_batch_size, pool.size):
                found[PoolUse(pool, tensor, stages, width)] = None
    return list(found)


def stage_counts(most: int, devices: int) -> list[int]:
    """How many stages a pool may form: every number, or of large pools those that most often divide well."""
    if devices <= FEW_COUNTS_FROM:
        return list(range(1, most + 1))
    return [k for k in (FEW_STAGES if devices <= POWERS_FROM else POWERS) if k <= most]


def _widths(widest: int, micro_batch_size: int, devices: int) -> list[int]:
    if devices <= EVERY_WIDTH_UP_TO:
        return list(range(widest, 0, -1))
    narrowest: dict[int, int] = {}
    for width in range(widest, 0, -1):
        if widest > ALL_WIDTHS_UP_TO and len(narrowest) == 2 and share(micro_batch_size, width) not in narrowest:
            break
        narrowest[share(micro_batch_size, width)] = width
    return sorted({widest, *narrowest.values()}, reverse=True)


def views(pools: Sequence[Pool]) -> Iterator[tuple[Pool, ...]]:
    """The pools as they are, and with the classes of an island joined into one pool at its slowest member's rates."""
    by_island: dict[str, list[Pool]] = {}
    for pool in pools:
        by_island.setdefault(pool.island, []).append(pool)
    options = []
    for members in by_island.values():
        options.append([members] if len(members) == 1 else [members, [joined(members)]])
    for chosen in product(*options):
        yield tuple(pool for part in chosen for pool in part)


def joined(pools: Sequence[Pool]) -> Pool:
    """One pool of several classes of an island: every rate and the memory of the least of them."""
    slowest = min(pools, key=lambda p: p.rates.flops_per_s)
    rates = slowest.rates.least(p.rates for p in pools)
    hosts: list[tuple[int, ...]] = [host for pool in pools for host in pool.hosts]
    name = "+".join(dict.fromkeys(p.device_class for p in pools))
    return Pool(slowest.island, name, slowest.speed, rates, tuple(sorted(hosts)))


def partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put some of the items 0..count-1 into groups, none empty; items left out stay idle."""

    def place(item: int, groups: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if item == count:
            if groups:
                yield groups
            return
        for index, group in enumerate(groups):
            yield from place(item + 1, (*groups[:index], (*group, item), *groups[index + 1 :]))
        yield from place(item + 1, (*groups, (item,)))
        yield from place(item + 1, groups)

    yield from place(0, ())


def orders(pools: Sequence[Pool], pins: Pins, *, alike: bool = False) -> list[tuple[int, ...]]:
    """Orders of the pools (by index) along a pipeline; of interchangeable pools only one order.

    `alike` says that all these islands are joined by equal links, so that equal pools of different islands are
    interchangeable too.
    """
    if pins.order is not None:
        place = {name: i for i, name in enumerate(pins.order)}
        return [tuple(sorted(range(len(pools)), key=lambda i: place[pools[i].island]))]
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    every = permutations(range(len(pools))) if len(pools) < MANY_POOLS else _ends(pools)
    for order in every:
        key = tuple(("" if alike else pools[i].island, pools[i].rates, tuple(map(len, pools[i].hosts))) for i in order)
        found.setdefault(key, order)
    return list(found.values())


def _ends(pools: Sequence[Pool]) -> Iterator[tuple[int, ...]]:
    """Every first and last pool; between them the one with most memory comes first.

    First and last hold embedding and LM head; between them the place decides only how much is held in flight.
    """
    by_memory = sorted(range(len(pools)), key=lambda i: -pools[i].rates.memory_bytes)
    for first, last in permutations(range(len(pools)), 2):
        yield (first, *(i for i in by_memory if i not in (first, last)), last)
