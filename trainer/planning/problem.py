"""The planning problem as frozen values: pools, costs, links, and what the recipe leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError, Infeasible, nearest
from hetctl.comm.contract.natives import native_of
from hetctl.comm.contract.plan import Basis
from hetctl.comm.contract.units import count_of, listed, show_bytes
from hetctl.trainer.model.tensor_cuts import adapter_parameters, cannot_cut
from hetctl.trainer.planning.costs import MODES, SELECTIVE_S, LayerCosts, Mode, ValueBytes
from hetctl.trainer.planning.hardware import not_in_the_table
from hetctl.trainer.planning.link_rates import LinkRates, read_link_rates
from hetctl.trainer.planning.over_shapes import Estimated, serving
from hetctl.trainer.planning.pools import Pool, base_class, read_pools
from hetctl.trainer.planning.precision import on_cpus, precision_of, why_not_bf16
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.planning.space import TENSOR_DEGREES, Pins
from hetctl.trainer.recipe import Recipe
from hetctl.trainer.schedule import SCHEDULES, Schedule

# (most devices, tolerance of the search and of each split)
TOLERANCES = ((64, 0.0), (512, 0.0005), (2048, 0.001), (math.inf, 0.005))
MANY_KINDS = 0.002  # the least tolerance where more than three kinds of devices, or three of many, can be combined
FEW = 16  # devices of three kinds, of which everything is looked at
# what CPU processes of one machine cost is a guess: activations are the smallest traffic unless much says otherwise
GUESSED = 2.0


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned. `samples` is the global batch."""

    costs: LayerCosts
    pools: tuple[Pool, ...]
    links: LinkRates
    modes: tuple[Mode, ...]  # what stages may do about memory
    tensors: tuple[int, ...]
    pins: Pins
    samples: int
    micro_batch_size: int | None = None
    schedules: tuple[Schedule, ...] = tuple(SCHEDULES.values())  # that may be chosen
    forwards_ahead: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    split: str = "auto"
    alpha: float = 1.0
    tolerance: float = 0.0  # relative; what is faster by less than this is not looked for
    across: float = 1.0  # handicap of data parallelism across islands: how much faster it must be
    notes: tuple[str, ...] = ()  # what a person should know of the figures behind the plan

    @property
    def basis(self) -> Basis:
        """What stands behind the seconds: the least certain of what was found for its devices."""
        found = [self.costs.measured(p.rates) for p in self.pools]
        if not all(found):
            return "table"
        return "interpolated" if any(isinstance(entry, Estimated) for entry in found) else "measured"


def _refuse_no_devices(cluster: Cluster) -> None:
    """Raise Infeasible for a cluster that has nothing to train on, with the hosts that could not be asked."""
    if any(island.members for island in cluster.islands):
        return
    missing = [f"{host.name} ({host.reason or host.status})" for host in cluster.hosts if host.status != "ok"]
    unasked = f"; not asked: {listed(missing, 4)}" if missing else ""
    hosts = count_of(len(cluster.hosts), "host")
    raise Infeasible(
        f"the cluster has no devices to train on: {hosts}, no GPU that can be used{unasked}",
        hint="`hetctl discover` says for each host what it found, and why not more",
    )


def _refuse_no_library(cluster: Cluster) -> None:
    """Raises Infeasible for islands whose vendor's library makes no groups here."""
    for island in cluster.islands:
        native = native_of(library=cluster.library_of(island.vendor))
        if not native.trains:
            raise Infeasible(
                f"nothing here trains on {island.vendor} GPUs: no groups of {native.library} are made",
                hint=f"leave island {island.name} out of the cluster; docs/adding-a-device.md says what is missing",
            )


def read_problem(
    cluster: Cluster,
    recipe: Recipe,
    *,
    speeds: Mapping[str, float] | None = None,
    profile: Profile | None = None,
) -> Problem:
    """The problem of a recipe on a cluster. Raises ConfigError for wishes that contradict each other."""
    _refuse_no_devices(cluster)
    _refuse_no_library(cluster)
    precision = precision_of(cluster, recipe)
    pools = read_pools(cluster, speeds=speeds, precision=precision)
    bridges = profile.bridges if profile else ()
    links = read_link_rates(cluster, pools, forced=recipe.bridge.transport, measured=bridges)
    if recipe.bridge.transport != "auto":
        for refusal in links.refused.values():
            raise refusal
    wish = recipe.parallelism
    size = None if recipe.batch.micro_batch_size == "auto" else recipe.batch.micro_batch_size
    if size is not None and recipe.batch.global_batch % size:
        raise Infeasible(
            f"batch.global_batch {recipe.batch.global_batch} is no multiple of batch.micro_batch_size {size}",
            hint="change one of them, or leave batch.micro_batch_size free",
        )
    if recipe.train.compile and wish.schedule != "auto" and SCHEDULES[wish.schedule].splits_backward:
        raise ConfigError(
            f"train.compile does not go with parallelism.schedule={wish.schedule}: compiled blocks have one backward",
            hint="train.compile=false, or another schedule",
        )
    costs = layer_costs(cluster, recipe, profile)
    return Problem(
        costs=costs,
        notes=(
            *_adapters(costs),
            *_estimates(cluster, costs, pools),
            *_left_to_others(cluster),
            *_notes(costs, pools, profile, precision),
            *why_not_bf16(cluster, recipe),
        ),
        pools=pools,
        links=links,
        modes=allowed_modes(recipe),
        tensors=tuple(t for t in TENSOR_DEGREES if not cannot_cut(costs.shape, t)),
        pins=_pins(cluster, recipe),
        samples=recipe.batch.global_batch,
        micro_batch_size=size,
        schedules=_schedules(recipe, guessed=cluster.runs == "gloo"),
        forwards_ahead=None if wish.forwards_ahead == "auto" else wish.forwards_ahead,
        layers=wish.layers,
        split=wish.split,
        alpha=wish.alpha,
        tolerance=tolerance_of(pools),
        across=GUESSED if cluster.runs == "gloo" else 1.0,
    )


def tolerance_of(pools: tuple[Pool, ...]) -> float:
    """The relative gain that is no longer looked for, by the number of devices and of their kinds."""
    devices, kinds = sum(p.size for p in pools), len(pools)
    exact = next(t for most, t in TOLERANCES if devices <= most)
    return max(exact, MANY_KINDS) if kinds > 3 or (kinds == 3 and devices > FEW) else exact


def _estimates(cluster: Cluster, costs: LayerCosts, pools: tuple[Pool, ...]) -> Iterator[str]:
    """Which classes have guessed figures that nothing measured or said by hand replaces."""
    unsaid = {p.device_class: base_class(cluster, p.device_class) for p in pools if p.rates.base}
    measured = {p.device_class for p in pools if costs.measured(p.rates)}
    for row in {row.name: row for name, row in unsaid.items() if row.estimate and name not in measured}.values():
        yield f"{not_in_the_table(row)}."


def _left_to_others(cluster: Cluster) -> Iterator[str]:
    """What of devices' memory is not planned with, by class."""
    used: dict[str, list[int]] = {}
    for device in (cluster.device(member) for island in cluster.islands for member in island.members):
        if device.used_bytes:
            used.setdefault(device.device_class, []).append(device.used_bytes)
    for name, sizes in used.items():
        most = f"up to {show_bytes(max(sizes))} each" if len(sizes) > 1 else show_bytes(sizes[0])
        yield (
            f"Of {len(sizes)} {name} {most} of memory was used by others (a display, another job?) when it was "
            "discovered, and is left to them; where that is over, discover again."
        )


def _adapters(costs: LayerCosts) -> Iterator[str]:
    """What is trained in place of the weights."""
    shape = costs.shape
    if shape.adapters:
        trained = shape.layers * adapter_parameters(shape)
        yield (
            f"Adapters of rank {shape.adapters.rank} are trained, {trained:,} parameters: the model's own "
            f"{shape.parameters:,} are held in {_held_in(costs)}, and nothing of them is summed."
        )
    if costs.referred:
        yield "Preferences: before each step the model without its adapters, the reference, makes a forward."


def _held_in(costs: LayerCosts) -> str:
    kind, each = costs.shape.quantised, f"{costs.value_bytes.compute} bytes each"
    return f"{kind} blocks, but for embedding, norms and head: {each}" if kind else each


def _notes(
    costs: LayerCosts, pools: tuple[Pool, ...], profile: Profile | None, precision: Precision
) -> tuple[str, ...]:
    """Of which classes a profile says nothing at this model, length and precision, or nothing measured just so."""
    if profile is None:
        return ()
    model, length = costs.shape.name, costs.seq_len
    notes = []
    for name, entry in {p.device_class: costs.measured(p.rates) for p in pools if p.rates.base}.items():
        if entry is None:
            about = f"of {name} for '{model}' at {length} tokens in {precision}"
            notes.append(f"The profile says nothing {about}: the table's figures stand in.")
        elif isinstance(entry, Estimated):
            notes.append(f"{name} at {model}, {length} tokens: {entry.how}.")
    return tuple(notes)


def layer_costs(cluster: Cluster, recipe: Recipe, profile: Profile | None) -> LayerCosts:
    """The cost model of a recipe's layers on a cluster."""
    shape, seq_len = recipe.shape(), recipe.model.seq_len
    precision = precision_of(cluster, recipe)
    over = recipe.train.sharded in ("auto", "replicas")
    value_bytes = ValueBytes.of(precision, recipe.optimizer.name, over_replicas=over)
    profile, usual = profile or Profile(()), "fp32" if on_cpus(cluster) else "bf16"
    alike = replace(profile, classes=tuple(c for c in profile.classes if (c.precision or usual) == precision))
    return LayerCosts(
        shape,
        seq_len,
        value_bytes,
        serving(alike, shape, seq_len),
        profile.native_sums,
        referred=recipe.dpo.beta is not None,
        selective_s=0.0 if recipe.train.compile else SELECTIVE_S,
        whole=recipe.train.sharded in ("optimizer", "replicas"),
    )


def _schedules(recipe: Recipe, *, guessed: bool) -> tuple[Schedule, ...]:
    """The one that is asked for, or all that may be chosen.

    Compiled blocks cannot split their backward, and stages that share devices cannot follow speeds (`train.adapt`).
    """
    if recipe.parallelism.schedule != "auto":
        return (SCHEDULES[recipe.parallelism.schedule],)
    wanted = ("always",) if guessed else ("always", "on devices")
    found = [s for s in SCHEDULES.values() if s.automatic in wanted]
    if recipe.train.compile:
        found = [s for s in found if not s.splits_backward]
    return tuple(s for s in found if s.chunks == (1,) or not recipe.train.adapt)


def allowed_modes(recipe: Recipe) -> tuple[Mode, ...]:
    """What stages may do about memory. Raises ConfigError for wishes that exclude each other."""
    wish = recipe.parallelism
    modes = tuple(
        m
        for m in MODES
        if wish.recompute in ("auto", m.recompute)
        and wish.activations in ("auto", "host" if m.activations else "device")
        and wish.optimizer_state in ("auto", "host" if m.offload else "device")
    )
    if not modes:
        raise ConfigError(
            f"recompute '{wish.recompute}' and activations '{wish.activations}' exclude each other",
            hint="activations on the host are not computed again: use parallelism.recompute=none",
        )
    return modes


def _pins(cluster: Cluster, recipe: Recipe) -> Pins:
    wish, shape = recipe.parallelism, recipe.shape()
    stages = None if wish.pipeline == "auto" else wish.pipeline
    if wish.layers is not None:
        if sum(wish.layers) != shape.layers or min(wish.layers) < 1:
            raise ConfigError(f"parallelism.layers must be positive and add up to {shape.layers}: {list(wish.layers)}")
        if stages not in (None, len(wish.layers)):
            raise ConfigError(f"parallelism.pipeline={stages}, but parallelism.layers lists {len(wish.layers)} stages")
        stages = len(wish.layers)
    tensor = None if wish.tensor == "auto" else wish.tensor
    if tensor is not None and tensor not in TENSOR_DEGREES:
        raise ConfigError(f"parallelism.tensor={tensor} is not possible", hint="1, 2, 4 or 8, dividing the heads")
    if tensor is not None and (why := cannot_cut(shape, tensor)):
        raise ConfigError(f"parallelism.tensor={tensor} is not possible: {why}", hint="choose another degree")
    replicas = None if wish.data == "auto" else wish.data
    order = _order(cluster, recipe)
    if wish.split != "auto" and (stages, replicas, order) == (None, None, None) and len(cluster.islands) > 1:
        # these rules share layers out among islands: one stage each, as they come
        order = tuple(i.name for i in cluster.islands)
        stages = len(order)
    if wish.forwards_ahead != "auto":
        if stages not in (None, len(wish.forwards_ahead)):
            raise ConfigError(f"parallelism.forwards_ahead names {len(wish.forwards_ahead)} stages, there are {stages}")
        stages = len(wish.forwards_ahead)
    if stages is not None and stages > shape.layers:
        raise ConfigError(
            f"{stages} pipeline stages are more than the {shape.layers} layers of '{shape.name}'",
            hint=f"use parallelism.pipeline of at most {shape.layers}",
        )
    return Pins(tensor, stages, replicas, order, every_island=cluster.source == "emulated")


def _order(cluster: Cluster, recipe: Recipe) -> tuple[str, ...] | None:
    order = recipe.parallelism.order
    if order == "auto":
        return None
    names = tuple(i.name for i in cluster.islands)
    if order == "given":
        return names
    for name in order:
        if name not in names:
            raise ConfigError(f"parallelism.order names '{name}', which is no island", hint=nearest(name, names))
    if len(set(order)) != len(order):
        raise ConfigError("parallelism.order names an island twice")
    return order
