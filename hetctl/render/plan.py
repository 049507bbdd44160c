"""A plan for people: islands, who runs which layers, what joins them, and why."""

from __future__ import annotations

from collections.abc import Sequence

from ClusterShell.RangeSet import RangeSet
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from hetctl.comm.contract.plan import Plan, PlannedBridge
from hetctl.comm.contract.units import count_of, show_bytes, show_rate, show_seconds, span_of
from hetctl.console import Sink
from hetctl.render.run import above_all


def show_plan(sink: Sink, plan: Plan, *, predicted: bool = True) -> None:
    """Print islands, stages, groups, bridges, the prediction (where that means something) and the reasons."""
    samples, devices = count_of(plan.global_batch, "sample"), count_of(plan.world_size, "device")
    title = f"{plan.model}: {samples} of {plan.seq_len} tokens a step on {devices}"
    parts: list[RenderableType] = [title, _islands(plan), _stages(plan), _groups(plan)]
    parts += _prediction(plan) if predicted else []
    for part in (*parts, *(f"- {reason}" for reason in plan.reasons)):
        sink.say(part)


def show_ranks(ranks: Sequence[int]) -> str:
    """`0-7`, `0-3,8`: ranks as ranges."""
    return str(RangeSet.fromlist(map(str, ranks)))


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {show_ranks(ranks)}"


def _islands(plan: Plan) -> Tree:
    tree = Tree("islands")
    for island in plan.islands:
        classes = " + ".join(island.device_classes)
        branch = tree.add(f"{island.name}: {island.vendor} {classes} on {island.fabric}, {named_ranks(island.ranks)}")
        idle = [r for r in island.ranks if plan.ranks[r].replica is None]
        if idle:
            branch.add(f"idle: {named_ranks(idle)}")
    for bridge in plan.bridges:
        tree.add(bridge_line(bridge)).add(escape(bridge.reason))
    return tree


def bridge_line(bridge: PlannedBridge) -> str:
    """Between which islands, over what, how fast."""
    rates = [r.rate_bytes_per_s for r in bridge.rails]
    total = sum(r for r in rates if r is not None) if None not in rates else None
    lanes = count_of(len(bridge.rails), "rail")
    return f"bridge {bridge.islands[0]} - {bridge.islands[1]}: {bridge.transport}, {lanes}, {show_rate(total)}"


def _stages(plan: Plan) -> Table:
    table = Table("replica", "stage", "island", "ranks", "layers", "tensor", "shards", "batches", "memory")
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            memory = max((plan.predicted.memory_bytes[r] for r in stage.ranks), default=0) if plan.predicted else 0
            table.add_row(
                str(number),
                str(index),
                plan.ranks[stage.ranks[0]].island,
                show_ranks(stage.ranks),
                f"{span_of(stage.layers[0], stage.layers[1] - 1)} ({stage.depth})",
                str(stage.tensor_parallel),
                f"{stage.shards}, weights whole" if stage.whole and stage.shards > 1 else str(stage.shards),
                f"{stage.micro_batches} x {stage.micro_batch_size}",
                ", ".join([show_bytes(memory or None), *stage.savings]),
            )
    return table


def _groups(plan: Plan) -> Table:
    """Groups counted by kind, back end and network: a large plan has thousands."""
    counts: dict[tuple[str, str, str], int] = {}
    for group in plan.groups:
        crosses = "bridged" if group.backend == "het" else "native"
        key = (group.kind, f"{group.backend} ({crosses})", group.net or "")
        counts[key] = counts.get(key, 0) + 1
    table = Table("groups", "kind", "runs on", "net")
    for (kind, backend, net), count in counts.items():
        table.add_row(str(count), kind, backend, net)
    return table


def _prediction(plan: Plan) -> list[str]:
    if (p := plan.predicted) is None:
        return []
    parts = [
        f"step {show_seconds(p.step_time_s)}",
        f"{p.tokens_per_s:,.0f} tokens/s",
        f"bubble {p.bubble_share:.1%}",
        f"bridge {p.bridge_share:.1%}",
    ]
    if p.efficiency is not None:
        parts.append(f"efficiency {p.efficiency:.1%} of what the islands reach alone{above_all(p.efficiency)}")
    return [f"predicted ({p.basis}): " + ", ".join(parts)]
