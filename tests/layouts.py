"""Plans spelled out by hand for tests: islands of ranks, replicas of stages, nothing chosen by a planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from hetctl.comm.plan import (
    Bridge,
    Group,
    Plan,
    PlannedIsland,
    PlannedRank,
    Replica,
    Segment,
    Stage,
    segments_of,
)


@dataclass(frozen=True)
class Cut:
    """One stage: its layers and its ranks."""

    layers: tuple[int, int]
    ranks: tuple[int, ...]
    shards: int = 1
    recompute: str = "none"
    offload: bool = False


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


def plan_of(layout: Layout, *, seq_len: int, transport: str = "tcp") -> Plan:
    """The plan of a layout; every group it needs, `het` where one crosses islands."""
    replicas = tuple(Replica(tuple(_stage(c, p) for c in p.cuts)) for p in layout.pipes)
    islands = tuple(PlannedIsland(f"i{n}", "cpu", ("cpu",), "host", r) for n, r in enumerate(layout.islands))
    home = {rank: island.name for island in islands for rank in island.ranks}
    where = {r: (n, s) for n, p in enumerate(layout.pipes) for s, c in enumerate(p.cuts) for r in c.ranks}
    ranks = tuple(_rank(r, home[r], where.get(r)) for r in sorted(home))
    segments = tuple(Segment(span, (_holders(layout, span),)) for span in segments_of(replicas))
    depth = max(len(p.cuts) for p in layout.pipes)
    return Plan(
        cluster_digest="test",
        model="test",
        seq_len=seq_len,
        global_batch=sum(r.samples for r in replicas),
        schedule="1f1b",
        forwards_ahead=layout.ahead or tuple(depth - i for i in range(depth)),
        islands=islands,
        ranks=ranks,
        replicas=replicas,
        segments=segments,
        groups=tuple(_groups(layout, segments, home)),
        bridges=tuple(Bridge((a.name, b.name), transport, (), "test") for a, b in combinations(islands, 2)),  # type: ignore[arg-type]
        predicted=None,
        reasons=("spelled out by a test",),
    )


def _rank(rank: int, island: str, place: tuple[int, int] | None) -> PlannedRank:
    replica, stages = (None, ()) if place is None else (place[0], (place[1],))
    return PlannedRank(rank, "here", rank, "cpu", island, replica, stages)


def _stage(cut: Cut, pipe: Pipe) -> Stage:
    return Stage(
        cut.layers,
        cut.ranks,
        pipe.micro_batch_size,
        pipe.micro_batches,
        shards=cut.shards,
        recompute=cut.recompute,  # type: ignore[arg-type]
        offload=cut.offload,
    )


def _holders(layout: Layout, span: tuple[int, int]) -> tuple[int, ...]:
    held = [
        r for p in layout.pipes for c in p.cuts if c.layers[0] <= span[0] and span[1] <= c.layers[1] for r in c.ranks
    ]
    return tuple(sorted(held))


def _groups(layout: Layout, segments: Sequence[Segment], home: dict[int, str]) -> list[Group]:
    groups = []

    def add(name: str, kind: str, ranks: tuple[int, ...]) -> None:
        backend = "het" if len({home[r] for r in ranks}) > 1 else "gloo"
        groups.append(Group(name, kind, ranks, backend))  # type: ignore[arg-type]

    for segment in segments:
        if len(segment.groups[0]) > 1:
            add(f"segment-{segment.layers[0]}", "segment", segment.groups[0])
    for number, pipe in enumerate(layout.pipes):
        for cut in pipe.cuts:
            for j in range(0, len(cut.ranks), cut.shards) if cut.shards > 1 else ():
                add(f"shards-{number}-{cut.ranks[j]}", "data", cut.ranks[j : j + cut.shards])
        for i, (a, b) in enumerate(zip(pipe.cuts, pipe.cuts[1:], strict=False)):
            add(f"pipe-{number}-{i}", "pipeline", a.ranks + b.ranks)
    ends = {r for p in layout.pipes for c in (p.cuts[0], p.cuts[-1]) for r in c.ranks}
    if len(ends) > 1:
        add("tied", "segment", tuple(sorted(ends)))
    return groups
