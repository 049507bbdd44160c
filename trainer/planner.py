"""The planner's face: a cluster and a recipe in, a validated plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from hetctl.comm.cluster import Cluster
from hetctl.comm.errors import ConfigError, Infeasible, nearest
from hetctl.comm.plan import Plan, Predicted, Replica, Stage
from hetctl.trainer.assemble import assemble
from hetctl.trainer.costs import MODES, PLAIN, LayerCosts, Mode, Numbers
from hetctl.trainer.partition import (
    Split,
    StageTable,
    best_split,
    fixed_split,
    holmes_layers,
    largest_remainder,
    uniform_layers,
)
from hetctl.trainer.pools import Pool, read_pools
from hetctl.trainer.profile import Profile
from hetctl.trainer.recipe import Recipe
from hetctl.trainer.schedule import in_flight
from hetctl.trainer.stages import StagePlace, StageSite, stage_table

Ability = str
EVERYTHING: frozenset[Ability] = frozenset({"tensor", "shards", "recompute", "offload"})
EXECUTABLE: frozenset[Ability] = frozenset()  # what trainer.loop can run beyond plain pipelines and replicas


def make_plan(
    cluster: Cluster,
    recipe: Recipe,
    *,
    speeds: Mapping[str, float] | None = None,
    profile: Profile | None = None,
    abilities: frozenset[Ability] = EVERYTHING,
) -> Plan:
    """The fastest plan the cost model knows, within `abilities`. Raises Infeasible or ConfigError."""
    pools = _one_per_island(read_pools(cluster, speeds=speeds))
    costs = layer_costs(cluster, recipe, profile)
    if recipe.parallelism.data not in ("auto", 1):
        found = _replicas_per_island(pools, recipe, costs, abilities)
    else:
        found = min(
            (c for order in _orders(pools, recipe) for c in _pipelines(order, recipe, costs, abilities)),
            key=lambda c: c.seconds,
            default=None,
        ) or _nothing_fits(pools, recipe, costs)
    tokens = recipe.batch.global_batch * recipe.model.seq_len
    memory = tuple(0 for _ in range(sum(p.size for p in pools)))
    predicted = Predicted(
        "measured" if costs.profiles else "table", found.seconds, tokens / found.seconds, 0.0, 0.0, None, memory
    )
    plan = assemble(
        cluster,
        recipe,
        replicas=found.replicas,
        schedule=found.schedule,
        forwards_ahead=found.forwards_ahead,
        predicted=predicted,
        reasons=found.reasons,
    )
    plan.validate(where="the plan", layers=costs.shape.layers)
    return plan


def layer_costs(cluster: Cluster, recipe: Recipe, profile: Profile | None) -> LayerCosts:
    """The cost model of a recipe's layers on a cluster."""
    shape, seq_len = recipe.shape(), recipe.model.seq_len
    precision = recipe.train.precision
    if precision == "auto":
        precision = "fp32" if cluster.runs == "gloo" or {i.vendor for i in cluster.islands} == {"cpu"} else "bf16"
    width = {"bf16": 4, "fp32": 4, "fp64": 8}[precision]
    optimizer = 2 * width if recipe.optimizer.name == "adamw" else 0
    numbers = Numbers(2 if precision == "bf16" else width, width, width, optimizer)
    return LayerCosts(shape, seq_len, numbers, profile.matching(shape, seq_len) if profile else {})


@dataclass(frozen=True)
class _Candidate:
    seconds: float
    replicas: tuple[Replica, ...]
    schedule: str
    forwards_ahead: tuple[int, ...]
    reasons: tuple[str, ...]


def _one_per_island(pools: Sequence[Pool]) -> list[Pool]:
    """Pools joined by island, at their slowest member's rates."""
    joined: dict[str, Pool] = {}
    for pool in pools:
        other = joined.get(pool.island)
        if other is None:
            joined[pool.island] = pool
            continue
        slow = min(pool, other, key=lambda p: p.rates.flops_per_s)
        hosts = tuple(sorted((*other.hosts, *pool.hosts)))
        joined[pool.island] = Pool(pool.island, slow.device_class, slow.speed, slow.rates, hosts)
    return list(joined.values())


def _orders(pools: Sequence[Pool], recipe: Recipe) -> list[tuple[Pool, ...]]:
    order = recipe.parallelism.order
    if order == "given":
        return [tuple(pools)]
    if order != "auto":
        by_name = {p.island: p for p in pools}
        for name in order:
            if name not in by_name:
                raise ConfigError(f"parallelism.order names '{name}'", hint=nearest(name, by_name))
        return [tuple(by_name[name] for name in order)]
    return list(permutations(pools)) if len(pools) <= 5 else [tuple(pools)]


def _pipelines(
    order: Sequence[Pool], recipe: Recipe, costs: LayerCosts, abilities: frozenset[Ability]
) -> list[_Candidate]:
    stages = _stage_pools(order, recipe, costs.shape.layers)
    widths = [len(ranks) for _, ranks in stages]
    found = []
    for size, count in _micro_batches(recipe, widths):
        candidate = _pipeline(stages, recipe, costs, abilities, size=size, count=count)
        if candidate is not None:
            found.append(candidate)
    return found


def _stage_pools(order: Sequence[Pool], recipe: Recipe, layers: int) -> list[tuple[Pool, tuple[int, ...]]]:
    """One stage per pool, or as many as pinned: each further stage goes where the widest stage would remain."""
    wanted = recipe.parallelism.pipeline
    pinned = recipe.parallelism.layers
    if pinned is not None:
        wanted = len(pinned)
    stages = len(order) if wanted == "auto" else wanted
    if stages > layers:
        raise Infeasible(f"{stages} stages are more than the {layers} layers of the model", hint="use fewer stages")
    if stages < len(order):
        raise ConfigError(
            f"parallelism.pipeline={stages} leaves islands out: there are {len(order)}",
            hint="raise parallelism.pipeline, or give each island a replica with parallelism.data",
        )
    counts = [1] * len(order)
    for _ in range(stages - len(order)):
        index = max(range(len(order)), key=lambda i: order[i].size / counts[i])
        counts[index] += 1
    found = []
    for pool, count in zip(order, counts, strict=True):
        if count > pool.size:
            raise Infeasible(f"{stages} stages are more than the devices there are", hint="use fewer stages")
        width = pool.size // count
        found += [(pool, pool.ranks[k * width : (k + 1) * width]) for k in range(count)]
    return found


def _micro_batches(recipe: Recipe, widths: Sequence[int]) -> list[tuple[int, int]]:
    total, pinned = recipe.batch.global_batch, recipe.batch.micro_batch_size
    sizes = [s for s in range(max(widths), total + 1) if total % s == 0]
    if pinned != "auto":
        if total % pinned:
            raise ConfigError(f"batch.global_batch {total} is no multiple of batch.micro_batch_size {pinned}")
        sizes = [s for s in sizes if s == pinned]
    if not sizes:
        raise Infeasible(
            f"a stage of {max(widths)} ranks needs micro-batches of at least {max(widths)} samples",
            hint="raise batch.global_batch or batch.micro_batch_size, or use more stages",
        )
    return [(s, total // s) for s in sizes]


def _pipeline(
    stages: Sequence[tuple[Pool, tuple[int, ...]]],
    recipe: Recipe,
    costs: LayerCosts,
    abilities: frozenset[Ability],
    *,
    size: int,
    count: int,
) -> _Candidate | None:
    p = len(stages)
    schedule = recipe.parallelism.schedule
    if schedule == "auto":
        crosses = len({pool.island for pool, _ in stages}) > 1
        schedule = "eager-1f1b" if crosses else "1f1b"
    ahead = recipe.parallelism.forwards_ahead
    if ahead == "auto":
        ahead = tuple(count for _ in stages) if schedule == "gpipe" else in_flight(p, schedule=schedule)
    modes = _modes(recipe, abilities)
    tables = []
    for index, (pool, ranks) in enumerate(stages):
        site = StageSite(pool.rates, len(ranks), per_host=max(map(len, pool.hosts)))
        place = StagePlace(index == 0, index == p - 1, ahead[index], size, count)
        tables.append(stage_table(costs, site, place, modes=modes)[0])
    split = _split(tables, stages, recipe, costs.shape.layers, count)
    if split is None:
        return None
    edges = [0]
    for layers in split.layers:
        edges.append(edges[-1] + layers)
    planned = tuple(
        Stage(
            (edges[i], edges[i + 1]),
            ranks,
            size,
            count,
            recompute=modes[split.modes[i]].recompute,
            offload=modes[split.modes[i]].offload,
        )
        for i, (_, ranks) in enumerate(stages)
    )
    where = ", then ".join(
        f"layers {s.layers[0]}-{s.layers[1] - 1} on {pool.name}" for s, (pool, _) in zip(planned, stages, strict=True)
    )
    reasons = (
        f"The pipeline runs {where}: activations are the smallest traffic between islands.",
        f"The split makes stage times as equal as whole layers allow, embedding and LM head counted; "
        f"{count} micro-batches of {size} samples.",
    )
    return _Candidate(split.seconds, (Replica(planned),), schedule, tuple(ahead), reasons)


def _modes(recipe: Recipe, abilities: frozenset[Ability]) -> tuple[Mode, ...]:
    wanted = recipe.parallelism.recompute
    modes = [
        m
        for m in MODES
        if (not m.offload or "offload" in abilities)
        and (m.recompute == "none" or "recompute" in abilities)
        and wanted in ("auto", m.recompute)
    ]
    if not modes:
        raise ConfigError(f"recompute '{wanted}' cannot be run yet", hint="use parallelism.recompute=none")
    return tuple(modes)


def _split(
    tables: Sequence[StageTable],
    stages: Sequence[tuple[Pool, tuple[int, ...]]],
    recipe: Recipe,
    layers: int,
    count: int,
) -> Split | None:
    wish = recipe.parallelism
    if wish.layers is not None:
        if sum(wish.layers) != layers or min(wish.layers) < 1:
            raise ConfigError(f"parallelism.layers must be positive and add up to {layers}, found {list(wish.layers)}")
        return fixed_split(tables, wish.layers, micro_batches=count)
    if wish.split == "uniform":
        return fixed_split(tables, uniform_layers(len(stages), layers), micro_batches=count)
    if wish.split == "holmes":
        speeds = [pool.rates.flops_per_s * len(ranks) for pool, ranks in stages]
        return fixed_split(tables, holmes_layers(speeds, layers, alpha=wish.alpha), micro_batches=count)
    return best_split(tables, layers, micro_batches=count)


def _replicas_per_island(
    pools: Sequence[Pool], recipe: Recipe, costs: LayerCosts, abilities: frozenset[Ability]
) -> _Candidate:
    """One replica per island; their samples by speed."""
    if recipe.parallelism.data != len(pools):
        raise ConfigError(
            f"parallelism.data={recipe.parallelism.data} with {len(pools)} islands: one replica per island is possible",
            hint=f"use parallelism.data={len(pools)}, or leave it to the planner",
        )
    speeds = [pool.rates.flops_per_s * pool.size for pool in pools]
    size = max(pool.size for pool in pools)
    if recipe.batch.micro_batch_size != "auto":
        size = recipe.batch.micro_batch_size
    if recipe.batch.global_batch % size or recipe.batch.global_batch // size < len(pools):
        raise Infeasible(f"batch.global_batch cannot be shared in micro-batches of {size}")
    counts = largest_remainder(recipe.batch.global_batch // size, speeds)
    parts = []
    for pool, count in zip(pools, counts, strict=True):
        part = _pipeline([(pool, pool.ranks)], recipe, costs, abilities, size=size, count=count)
        if part is None:
            _nothing_fits(pools, recipe, costs)
        else:
            parts.append(part)
    replicas = tuple(r for part in parts for r in part.replicas)
    reason = f"Each island trains a replica; accumulation counts {'/'.join(map(str, counts))} follow their speeds."
    return _Candidate(max(p.seconds for p in parts), replicas, "1f1b", (1,), (reason,))


def _nothing_fits(pools: Sequence[Pool], recipe: Recipe, costs: LayerCosts) -> _Candidate:
    need = costs.shape.parameters * costs.state_bytes_per_parameter()
    have = sum(p.rates.memory_bytes * p.size for p in pools)
    raise Infeasible(
        f"'{costs.shape.name}' does not fit: its state alone is {need / 2**30:.1f} GiB of {have / 2**30:.1f} GiB",
        hint="use more memory, a smaller model or shorter samples",
    )


__all__ = ["EVERYTHING", "EXECUTABLE", "PLAIN", "layer_costs", "make_plan"]
