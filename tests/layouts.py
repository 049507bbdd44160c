"""Plans spelled out by hand for tests: islands of ranks, replicas of stages, nothing chosen by a planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from hetctl.comm.contract.plan import (
    Plan,
    PlannedBridge,
    PlannedGroup,
    PlannedIsland,
    PlannedRank,
    Replica,
    Segment,
    Stage,
    segments_of,
    tensor_peers,
    tied_groups,
)


@dataclass(frozen=True)
class Cut:
    """One stage: its layers and its ranks."""

    layers: tuple[int, int]
    ranks: tuple[int, ...]
    shards: int = 1
    recompute: str = "none"
    offload: bool = False
    host_activations: bool = False
    tensor: int = 1

    @property
    def tensor_groups(self) -> list[tuple[int, ...]]:
        return [self.ranks[k : k + self.tensor] for k in range(0, len(self.ranks), self.tensor)]


@dataclass(frozen=True)
class Pipe:
    """One replica: its stages and its share of the batch."""

    cuts: tuple[Cut, ...]
    micro_batch_size: int
    micro_batches: int


@dataclass(frozen=True)
class Layout:
    """Islands (ranks each) and replicas."""

    islands: tuple[tuple[int, ...], ...]
    pipes: tuple[Pipe, ...]
    ahead: tuple[int, ...] | None = None
    schedule: str = "1f1b"


def plan_of(layout: Layout, *, seq_len: int, transport: str = "tcp") -> Plan:
    """The plan of a layout; every group it needs, `het` where one crosses islands."""
    replicas = tuple(Replica(tuple(_stage(c, p) for c in p.cuts)) for p in layout.pipes)
    islands = tuple(PlannedIsland(f"i{n}", "cpu", ("cpu",), "host", r) for n, r in enumerate(layout.islands))
    home = {rank: island.name for island in islands for rank in island.ranks}
    where: dict[int, list[tuple[int, int]]] = {}
    for n, p in enumerate(layout.pipes):
        for s, c in enumerate(p.cuts):
            for r in c.ranks:
                where.setdefault(r, []).append((n, s))
    ranks = tuple(_rank(r, home[r], where.get(r)) for r in sorted(home))
    segments = tuple(Segment(span, _holders(replicas, span)) for span in segments_of(replicas))
    depth = max(len(p.cuts) for p in layout.pipes)
    return Plan(
        cluster_digest="test",
        model="test",
        seq_len=seq_len,
        global_batch=sum(r.samples for r in replicas),
        schedule=layout.schedule,
        forwards_ahead=layout.ahead or tuple(depth - i for i in range(depth)),
        islands=islands,
        ranks=ranks,
        replicas=replicas,
        segments=segments,
        groups=tuple(_groups(layout, replicas, segments, home)),
        bridges=tuple(PlannedBridge((a.name, b.name), transport, (), "test") for a, b in combinations(islands, 2)),  # type: ignore[arg-type]
        predicted=None,
        reasons=("spelled out by a test",),
    )


def _rank(rank: int, island: str, places: list[tuple[int, int]] | None) -> PlannedRank:
    replica = places[0][0] if places else None
    return PlannedRank(rank, "here", rank, "cpu", island, replica, tuple(s for _, s in places or ()))


def _stage(cut: Cut, pipe: Pipe) -> Stage:
    return Stage(
        cut.layers,
        cut.ranks,
        pipe.micro_batch_size,
        pipe.micro_batches,
        tensor_parallel=cut.tensor,
        shards=cut.shards,
        recompute=cut.recompute,  # type: ignore[arg-type]
        offload=cut.offload,
        offload_activations=cut.host_activations,
    )


def _holders(replicas: Sequence[Replica], span: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    return tensor_peers(s for r in replicas for s in r.stages if s.layers[0] <= span[0] and span[1] <= s.layers[1])


def _groups(
    layout: Layout, replicas: tuple[Replica, ...], segments: Sequence[Segment], home: dict[int, str]
) -> list[PlannedGroup]:
    groups = []

    def add(name: str, kind: str, ranks: tuple[int, ...]) -> None:
        backend = "het" if len({home[r] for r in ranks}) > 1 else "gloo"
        groups.append(PlannedGroup(name, kind, ranks, backend))  # type: ignore[arg-type]

    for segment in segments:
        for k, members in enumerate(segment.groups):
            if len(members) > 1:
                add(f"segment-{segment.layers[0]}-{k}", "segment", members)
    for number, pipe in enumerate(layout.pipes):
        for cut in pipe.cuts:
            for unit in cut.tensor_groups if cut.tensor > 1 else ():
                add(f"tensor-{number}-{unit[0]}", "tensor", unit)
            alike = cut.ranks[:: cut.tensor]
            for j in range(0, len(alike), cut.shards) if cut.shards > 1 else ():
                for k in range(cut.tensor):
                    sharing = cut.ranks[k :: cut.tensor][j : j + cut.shards]
                    add(f"shards-{number}-{sharing[0]}", "data", sharing)
        for i, (a, b) in enumerate(zip(pipe.cuts, pipe.cuts[1:], strict=False)):
            add(f"pipe-{number}-{i}", "pipeline", a.ranks + b.ranks)
    for k, ends in enumerate(tied_groups(replicas)):
        if len(ends) > 1:
            add(f"tied-{k}", "segment", ends)
    return groups
