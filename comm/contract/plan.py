"""The plan as frozen values: the one contract between the planner, the launcher and the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Literal

from hetctl.comm.contract.cluster import SCHEMA_VERSION, Cluster, TransportKind, read_versioned
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.kept_files import write_stamped
from hetctl.comm.contract.natives import NativeName
from hetctl.comm.contract.placement import joined_natively
from hetctl.comm.contract.transports import NATIVE

GroupKind = Literal["tensor", "data", "pipeline", "segment"]
BackendName = Literal[NativeName, "het"]
GroupNet = Literal["ib", "plugin", "socket"]  # how its native library leaves a host: RDMA verbs, libfabric, TCP
Basis = Literal["measured", "interpolated", "table"]
Span = tuple[int, int]  # layers [first, past_last)


@dataclass(frozen=True)
class PlannedIsland:
    """An island of the plan."""

    name: str  # as in the cluster
    vendor: str  # that it stands for: nvidia, amd, ...; cpu
    device_classes: tuple[str, ...]  # of its devices
    fabric: str  # what joins it: 'host', or the name of a network
    ranks: tuple[int, ...]  # who is in it


def planned_islands(cluster: Cluster) -> tuple[PlannedIsland, ...]:
    """The islands of a cluster that have members; ranks count through these in order."""
    found, first = list[PlannedIsland](), 0
    for island in (i for i in cluster.islands if i.members):
        ranks = tuple(range(first, first + len(island.members)))
        classes = tuple(dict.fromkeys(cluster.device(m).device_class for m in island.members))
        found.append(PlannedIsland(island.name, island.vendor, classes, island.fabric, ranks))
        first += len(ranks)
    return tuple(found)


@dataclass(frozen=True)
class PlannedRank:
    """One process: where it runs and which stages it holds (several under interleaved schedules)."""

    rank: int  # from 0, in order
    host: str  # a name of the cluster
    device: int  # its index on that host
    device_class: str  # what it is, or stands for
    island: str  # that it is in
    replica: int | None  # None: the plan leaves this device idle
    stages: tuple[int, ...]  # of its replica, from 0
    nics: tuple[str, ...] = ()  # that its traffic between hosts takes, nearest first
    speed: float = 1.0  # emulation: the share of its real speed
    memory_bytes: int | None = None  # emulation: a cap on what it may allocate


def savings(recompute: str, *, activations: bool, optimizer: bool) -> tuple[str, ...]:
    """What is done about memory, in words; `activations` and `optimizer` state may be on the host."""
    said = [f"{recompute} recompute"] if recompute != "none" else []
    said += ["activations on the host"] if activations else []
    return (*said, *(["optimiser state on the host"] if optimizer else []))


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one group of ranks, and how those ranks run them."""

    layers: Span  # [first, past the last]
    ranks: tuple[int, ...]  # in the order of their parts
    micro_batch_size: int  # samples per micro-batch over the whole width
    micro_batches: int  # in a step
    tensor_parallel: int = 1  # ranks that share each layer
    shards: int = 1  # ranks that share optimiser state
    recompute: Literal["none", "selective", "full"] = "none"  # what backward computes again instead of keeping it
    offload: bool = False  # of the optimiser's state
    offload_activations: bool = False  # they wait for backward in host memory
    whole: bool | None = None  # of shards: only optimiser state is shared out; None: decided when the ranks start

    @property
    def depth(self) -> int:
        """How many layers."""
        return self.layers[1] - self.layers[0]

    @property
    def width(self) -> int:
        """How many parts the samples of a micro-batch are shared among."""
        return len(self.ranks) // self.tensor_parallel

    @property
    def savings(self) -> tuple[str, ...]:
        """What it does about memory, in words."""
        return savings(self.recompute, activations=self.offload_activations, optimizer=self.offload)


@dataclass(frozen=True)
class Replica:
    """One full pipeline of stages."""

    stages: tuple[Stage, ...]
    forwards_ahead: tuple[int, ...] | None = None  # per stage; None: as the plan says for all

    @property
    def samples(self) -> int:
        """Samples of a step that this replica works on."""
        return self.stages[0].micro_batch_size * self.stages[0].micro_batches


@dataclass(frozen=True)
class Segment:
    """Layers that every replica keeps within one stage, and the groups that sum their gradients."""

    layers: Span  # [first, past the last]
    groups: tuple[tuple[int, ...], ...]  # of ranks, each of which holds a copy


@dataclass(frozen=True)
class PlannedGroup:
    """One process group: who is in it, what really runs it, over which network."""

    name: str  # unique in the plan
    kind: GroupKind  # what it is for
    ranks: tuple[int, ...]  # its members
    backend: BackendName  # the native library, or `het` across islands
    net: GroupNet | None = None  # how its native library leaves a host, where it does


@dataclass(frozen=True)
class PlannedRail:
    """One NIC-bound lane of a bridge."""

    from_rank: int  # one end
    from_nic: str  # its interface or RDMA port
    to_rank: int  # the other end
    to_nic: str  # its interface or RDMA port
    rate_bytes_per_s: float | None = None  # one way


@dataclass(frozen=True)
class PlannedBridge:
    """How two islands talk in this plan, and why so."""

    islands: tuple[str, str]  # the two that it joins
    transport: TransportKind  # what carries the bytes
    rails: tuple[PlannedRail, ...]
    reason: str  # why it was chosen
    forced: bool = False  # a person asked for this transport: no other may take its place


@dataclass(frozen=True)
class StageCost:
    """What each rank of a stage is expected to need at so many layers, and for each layer more or fewer."""

    layers: int  # at which it was found
    micro_batch_size: int  # at which it was found
    compute_s: float  # of a micro-batch, there and back
    block_s: float  # of a micro-batch, each further layer
    most_layers: int  # that certainly fit into its ranks' memory
    ranks: int = 1  # of the stage
    tensor_parallel: int = 1  # of the stage
    recompute: str = "none"  # of the stage

    @classmethod
    def of(cls, stage: Stage, compute_s: float, block_s: float, most_layers: int) -> StageCost:
        """What was found for a stage as it is."""
        how = (len(stage.ranks), stage.tensor_parallel, stage.recompute)
        return cls(stage.depth, stage.micro_batch_size, compute_s, block_s, most_layers, *how)

    def fits(self, stage: Stage) -> bool:
        """Whether a stage is run as the one that this was found for, however many layers it has."""
        mine = (self.micro_batch_size, self.ranks, self.tensor_parallel, self.recompute)
        return mine == (stage.micro_batch_size, len(stage.ranks), stage.tensor_parallel, stage.recompute)

    def compute_at(self, layers: int) -> float:
        """Seconds of a micro-batch at another number of layers."""
        return self.compute_s + (layers - self.layers) * self.block_s


@dataclass(frozen=True)
class Predicted:
    """What the planner expects. `basis` says whether costs were measured, are between measured ones, or the table's."""

    basis: Basis  # where the seconds of layers come from
    step_time_s: float  # of one step
    tokens_per_s: float  # of all replicas together
    bubble_share: float  # of the step, waiting for work of other stages
    bridge_share: float  # of the step, waiting for what crosses islands
    efficiency: float | None  # tokens/s over the sum of what each island's own best plan reaches alone
    memory_bytes: tuple[int, ...]  # that each rank needs, by rank
    mfu: float | None = None  # over the peak of all devices
    bound_tokens_per_s: float | None = None  # every device computing all the time: no bubbles, no transfers
    stages: tuple[tuple[StageCost, ...], ...] = ()  # by replica and stage; empty: unknown


@dataclass(frozen=True)
class Plan:
    """Topology + partition + transports, with a reason for each choice."""

    cluster_digest: str  # of the cluster that it was made for
    model: str  # its name or path
    seq_len: int  # tokens per sample
    global_batch: int  # samples
    schedule: str  # the order of work in all pipelines
    forwards_ahead: tuple[int, ...]  # forwards in flight, of each stage
    islands: tuple[PlannedIsland, ...]
    ranks: tuple[PlannedRank, ...]
    replicas: tuple[Replica, ...]
    segments: tuple[Segment, ...]
    groups: tuple[PlannedGroup, ...]
    bridges: tuple[PlannedBridge, ...]
    predicted: Predicted | None
    reasons: tuple[str, ...]  # one sentence for each choice
    over_replicas: bool = False  # optimiser state is shared out over all replicas, not inside stages only
    schema_version: int = SCHEMA_VERSION  # of this file's form

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def layer_count(self) -> int:
        return max(stage.layers[1] for replica in self.replicas for stage in replica.stages)

    def cost(self, replica: int, stage: int) -> StageCost | None:
        """What was predicted of a stage; None where nothing was, or of others (plan files are older, or edited)."""
        stages = self.predicted.stages if self.predicted is not None else ()
        known = stages[replica] if replica < len(stages) else ()
        found = known[stage] if stage < len(known) else None
        return found if found is not None and found.fits(self.replicas[replica].stages[stage]) else None

    def forwards_of(self, replica: int, stage: int) -> int:
        """Forwards in flight of one stage of one replica."""
        own = self.replicas[replica].forwards_ahead
        return (self.forwards_ahead if own is None else own)[stage]

    @cached_property
    def tensor_degrees(self) -> dict[int, int]:
        """Rank -> the tensor-parallel degree of its stages."""
        return {r: s.tensor_parallel for replica in self.replicas for s in replica.stages for r in s.ranks}

    def cuts_unlike(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks hold parameters cut by different tensor-parallel degrees."""
        return len({self.tensor_degrees[r] for r in ranks}) > 1

    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """Who sums a tied embedding's gradient: the ranks of all first and last stages."""
        return tied_groups(self.replicas)

    @cached_property
    def island_of_rank(self) -> dict[int, PlannedIsland]:
        return {rank: island for island in self.islands for rank in island.ranks}

    @cached_property
    def ranks_of_replica(self) -> dict[int | None, list[PlannedRank]]:
        found: dict[int | None, list[PlannedRank]] = {}
        for rank in self.ranks:
            found.setdefault(rank.replica, []).append(rank)
        return found

    def crosses_islands(self, ranks: Iterable[int]) -> bool:
        """Whether a bridge lies between these ranks: they are in islands that no native library joins."""
        names = dict.fromkeys(self.island_of_rank[r].name for r in ranks)
        return len(joined_natively(names, self.bridges)) > 1

    def validate(self, *, where: str, layers: int | None = None) -> None:
        """Raise ConfigError unless every rank and every layer is where exactly one owner expects it.

        `layers` is the model's number of blocks, where known: then none may be missing at the end.
        """
        _check_ranks(self, where)
        for number, replica in enumerate(self.replicas):
            _check_replica(self, number, replica, where, self.layer_count if layers is None else layers)
        samples = sum(r.samples for r in self.replicas)
        if samples != self.global_batch:
            raise ConfigError(f"{where}: the replicas take {samples} samples, global_batch is {self.global_batch}")
        _check_segments(self, where)
        _check_joins(self, where)
        if self.predicted is not None and len(self.predicted.memory_bytes) != self.world_size:
            raise ConfigError(
                f"{where}: predicted.memory_bytes has {len(self.predicted.memory_bytes)} entries for "
                f"{self.world_size} ranks",
                hint="one for each rank, in their order; or predicted: null",
            )
        for group in self.groups:
            unknown = [r for r in group.ranks if not 0 <= r < self.world_size]
            if unknown:
                raise ConfigError(f"{where}: group '{group.name}' names rank {unknown[0]}, which does not exist")
            if group.backend != "het" and self.crosses_islands(group.ranks):
                raise ConfigError(f"{where}: group '{group.name}' crosses islands but is {group.backend}, not het")


def _check_joins(plan: Plan, where: str) -> None:
    """What native ways and shared-out state need: one vendor at both ends, weights whole everywhere."""
    vendors = {island.name: island.vendor for island in plan.islands}
    for bridge in plan.bridges:
        if unknown := [name for name in bridge.islands if name not in vendors]:
            raise ConfigError(f"{where}: a bridge joins island '{unknown[0]}', which the plan does not have")
        if bridge.transport == NATIVE and len({vendors[name] for name in bridge.islands}) > 1:
            raise ConfigError(
                f"{where}: no native library joins {' and '.join(bridge.islands)}: they are of two vendors"
            )
    cut = [s for r in plan.replicas for s in r.stages if s.shards > 1 and s.whole is False]
    if plan.over_replicas and cut:
        raise ConfigError(
            f"{where}: over_replicas needs whole weights, but a stage on ranks {cut[0].ranks} has whole: false"
        )


def segments_of(replicas: tuple[Replica, ...]) -> tuple[Span, ...]:
    """The coarsest spans that lie within one stage of every replica: the union of all cuts."""
    cuts = sorted({edge for r in replicas for s in r.stages for edge in s.layers})
    return tuple(itertools.pairwise(cuts))


def segment_of(replicas: Sequence[Replica], span: Span) -> Segment:
    """Who sums the gradients of a span: one group per tensor shard where all holders shard alike."""
    return Segment(span, tensor_peers(_holders(replicas, span)))


def _holders(replicas: Sequence[Replica], span: Span) -> list[Stage]:
    return [s for r in replicas for s in r.stages if s.layers[0] <= span[0] and span[1] <= s.layers[1]]


def summing_groups(
    replicas: Sequence[Replica],
    segments: Iterable[Segment],
    *,
    tied: Iterable[tuple[int, ...]],
    held: Iterable[PlannedGroup],
) -> list[tuple[str, tuple[int, ...]]]:
    """Name and ranks of each group that sums gradients: of segments, and of a tied embedding's holders.

    `held` are the groups inside stages, which may be the holders' already.
    """
    found = []
    for segment in segments if len(replicas) > 1 else ():
        name = f"segment.{segment.layers[0]}-{segment.layers[1]}"
        for k, ranks in enumerate(segment.groups):
            found += [(name + (f".{k}" if len(segment.groups) > 1 else ""), ranks)] if len(ranks) > 1 else []
    holders, taken = list(tied), [set(g.ranks) for g in held] + [set(ranks) for _, ranks in found]
    for k, ranks in enumerate(holders):
        if len(ranks) > 1 and set(ranks) not in taken:
            found.append(("tied" if len(holders) == 1 else f"tied.{k}", ranks))
    return found


def tensor_peers(stages: Iterable[Stage]) -> tuple[tuple[int, ...], ...]:
    """The ranks of these stages in groups that hold the same parts; all together where degrees differ."""
    held = tuple(stages)
    degrees = {s.tensor_parallel for s in held}
    step = degrees.pop() if len(degrees) == 1 else 1
    return tuple(tuple(dict.fromkeys(rank for s in held for rank in s.ranks[k::step])) for k in range(step))


def tied_groups(replicas: Iterable[Replica]) -> tuple[tuple[int, ...], ...]:
    """Who sums a tied embedding's gradient: the ranks of first and last stages that hold the same part of it."""
    return tensor_peers(s for replica in replicas for s in (replica.stages[0], replica.stages[-1]))


def load_plan(path: Path, *, layers: int | None = None) -> Plan:
    """A plan.yaml, validated (against the model's number of blocks, where given). Raises ConfigError."""
    plan = read_versioned(path, Plan, what="plan")
    plan.validate(where=path.name, layers=layers)
    return plan


_HEADER = "Who does what, and why. Editable: it is validated when loaded."


def save_plan(path: Path, plan: Plan, *, keep: bool = False) -> Path | None:
    """Write plan.yaml atomically; where the old one is kept, if that is asked for and it differs."""
    return write_stamped(path, plan, header=_HEADER, keep=keep)


def _check_ranks(plan: Plan, where: str) -> None:
    numbers = [r.rank for r in plan.ranks]
    if numbers != list(range(len(numbers))):
        raise ConfigError(f"{where}: ranks must be 0..{len(numbers) - 1} in order, each once, found {numbers[:20]}")
    listed = sorted(rank for island in plan.islands for rank in island.ranks)
    if listed != numbers:
        odd = sorted(set(listed) ^ set(numbers)) or sorted({r for r in listed if listed.count(r) > 1})
        raise ConfigError(f"{where}: rank {odd[0]} must be in exactly one island")
    for rank in plan.ranks:
        if plan.island_of_rank[rank.rank].name != rank.island:
            raise ConfigError(f"{where}: rank {rank.rank} says island '{rank.island}', the islands say otherwise")
        if not 0 < rank.speed < inf:  # NaN fits no comparison
            raise ConfigError(f"{where}: the speed of rank {rank.rank} must be finite and positive, found {rank.speed}")


def _check_replica(plan: Plan, number: int, replica: Replica, where: str, layers: int) -> None:
    place = f"{where}: replica {number}"
    if not replica.stages:
        raise ConfigError(f"{place} has no stages")
    edge = 0
    for index, stage in enumerate(replica.stages):
        _check_stage(plan, stage, replica, f"{place}, stage {index}")
        if stage.layers[0] != edge:
            raise ConfigError(f"{place}: stage {index} begins at layer {stage.layers[0]}, expected {edge}")
        edge = stage.layers[1]
        for rank in stage.ranks:
            owner = plan.ranks[rank] if 0 <= rank < plan.world_size else None
            if owner is None or owner.replica != number or index not in owner.stages:
                raise ConfigError(f"{place}: stage {index} lists rank {rank}, which is not placed there")
    if edge != layers:
        raise ConfigError(f"{place} covers layers up to {edge}, the model has {layers}")
    _check_forwards(plan, number, replica, place)
    members = [frozenset(stage.ranks) for stage in replica.stages]
    for placed in plan.ranks_of_replica.get(number, ()):
        for index in placed.stages:
            if index >= len(members) or placed.rank not in members[index]:
                raise ConfigError(f"{place}: rank {placed.rank} is missing from stage {index}")


def _check_forwards(plan: Plan, number: int, replica: Replica, place: str) -> None:
    """A stage further ahead than the one before it waits for forwards that wait for its backwards: for ever."""
    own, depth = replica.forwards_ahead, len(replica.stages)
    ahead, named = (plan.forwards_ahead, max(len(r.stages) for r in plan.replicas)) if own is None else (own, depth)
    if len(ahead) != named or min(ahead) < 1:
        raise ConfigError(
            f"{place}: forwards_ahead {list(ahead)} must name each stage's forwards in flight",
            hint=f"a list of {named}, each at least 1",
        )
    if any(len(placed.stages) > 1 for placed in plan.ranks_of_replica.get(number, ())):
        return  # interleaved: devices follow the schedule's own order, these only tell of memory
    held = [min(count, stage.micro_batches) for count, stage in zip(ahead, replica.stages, strict=False)]
    if any(later > earlier for earlier, later in itertools.pairwise(held)):
        raise ConfigError(
            f"{place}: forwards_ahead {list(ahead)} grows along the stages: they would wait for each other for ever",
            hint="no stage may run further ahead than the one before it",
        )


def _check_stage(plan: Plan, stage: Stage, replica: Replica, place: str) -> None:
    if stage.depth < 1:
        raise ConfigError(f"{place} holds no layer")
    if not stage.ranks or len(set(stage.ranks)) != len(stage.ranks):
        raise ConfigError(f"{place} must list its ranks, each once")
    if stage.tensor_parallel < 1 or len(stage.ranks) % stage.tensor_parallel:
        raise ConfigError(f"{place}: {len(stage.ranks)} ranks do not divide by tensor_parallel {stage.tensor_parallel}")
    if stage.shards < 1:
        raise ConfigError(f"{place}: shards must be at least 1, found {stage.shards}")
    _check_tensor_groups(plan, stage, place)
    if stage.micro_batch_size < stage.width or stage.micro_batches < 1:
        raise ConfigError(
            f"{place}: {stage.micro_batches} micro-batches of {stage.micro_batch_size} samples cannot be shared "
            f"by a width of {stage.width}",
            hint="every rank of a stage needs at least one sample of each micro-batch",
        )
    first = replica.stages[0]
    if (stage.micro_batch_size, stage.micro_batches) != (first.micro_batch_size, first.micro_batches):
        raise ConfigError(
            f"{place} takes {stage.micro_batches} micro-batches of {stage.micro_batch_size} samples, the first stage "
            f"of its replica {first.micro_batches} of {first.micro_batch_size}",
            hint="micro-batches go through a replica's stages as they are: give all its stages the same",
        )


def _check_tensor_groups(plan: Plan, stage: Stage, place: str) -> None:
    """Tensor groups are neighbours in a stage's list: each on one host, of one device class."""
    step = stage.tensor_parallel
    for first in range(0, len(stage.ranks), step) if step > 1 else ():
        group = [plan.ranks[r] for r in stage.ranks[first : first + step] if 0 <= r < plan.world_size]
        for what, found in (("hosts", {r.host for r in group}), ("device classes", {r.device_class for r in group})):
            if len(found) > 1:
                raise ConfigError(
                    f"{place}: the tensor group of ranks {[r.rank for r in group]} is on {len(found)} {what}",
                    hint="tensor parallelism stays inside one host and one device class",
                )


def _check_segments(plan: Plan, where: str) -> None:
    spans = tuple(s.layers for s in plan.segments)
    if spans != segments_of(plan.replicas):
        raise ConfigError(f"{where}: the segments do not match the stages' cuts: expected {segments_of(plan.replicas)}")
    for segment in plan.segments:
        holders = {rank for stage in _holders(plan.replicas, segment.layers) for rank in stage.ranks}
        listed = [rank for group in segment.groups for rank in group]
        if set(listed) != holders or len(listed) != len(holders):
            odd = sorted(set(listed) ^ holders)
            raise ConfigError(f"{where}: segment {segment.layers} must list each holder once (rank {odd[:1]})")
