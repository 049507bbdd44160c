"""A plan's cluster as a picture: islands of machines with their devices and NICs, links as wide as they are fast.

Hand-made SVG: no chart library draws this. Colours are page.css's, by vendor; what limits a step is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from hetctl.comm.contract.plan import Plan, PlannedBridge, PlannedIsland, PlannedRank
from hetctl.comm.contract.units import count_of, listed, show_rate
from hetctl.render.page import scrolled
from hetctl.render.plan import named_ranks

ISLAND, GAP, EDGE = 290, 60, 12  # pixels
HOST, HEAD = 62, 52
MOST_HOSTS = 3  # of an island that are drawn; the others are counted
MOST_DEVICES, MOST_RAILS = 14, 4
SLOWEST = " slowest"  # a class beside the others


def cluster_picture(plan: Plan, slowest: Sequence[str] = (), why: str = "") -> Markup:
    """The picture. `slowest` is the island, or the two that a bridge joins, that limits a step; `why` says how."""
    tall = max(_height(plan, island) for island in plan.islands)
    left = {island.name: EDGE + i * (ISLAND + GAP) for i, island in enumerate(plan.islands)}
    width = 2 * EDGE + len(left) * (ISLAND + GAP) - GAP
    drawn = []
    for island in plan.islands:
        marked = list(slowest) == [island.name]
        box = _island(plan, island, left[island.name], tall, why if marked else "")
        drawn.append(Markup("<g class='vendor-{}{}'>{}</g>").format(island.vendor, SLOWEST if marked else "", box))
    bridges, height = _bridges(plan, left, tall + EDGE, slowest, why)
    label = "cluster: " + "; ".join(_said(plan, island) for island in plan.islands)
    pattern = "<svg class='cluster' viewBox='0 0 {0} {1:.0f}' width='{0}' role='img' aria-label='{2}'>{3}</svg>"
    return scrolled(Markup(pattern).format(width, height, label, Markup().join([*drawn, *bridges])), "the cluster")


def _hosts(plan: Plan, island: PlannedIsland) -> dict[str, list[PlannedRank]]:
    found: dict[str, list[PlannedRank]] = {}
    for rank in island.ranks:
        found.setdefault(plan.ranks[rank].host, []).append(plan.ranks[rank])
    return found


def _said(plan: Plan, island: PlannedIsland) -> str:
    count = len(_hosts(plan, island))
    hosts = count_of(count, "host")
    return f"{island.name}, {count_of(len(island.ranks), 'device')} on {hosts}, {island.fabric}"


def _height(plan: Plan, island: PlannedIsland) -> int:
    count = len(_hosts(plan, island))
    return HEAD + min(count, MOST_HOSTS) * (HOST + 8) + (20 if count > MOST_HOSTS else 4)


def _island(plan: Plan, island: PlannedIsland, x: int, tall: int, why: str) -> Markup:
    hosts = _hosts(plan, island)
    kinds = f"{island.vendor}: {' + '.join(island.device_classes)}, {island.fabric}"
    parts = [
        _rect("box", x, EDGE, ISLAND, tall, 8),
        _text(x + 12, EDGE + 20, f"{island.name}: {named_ranks(island.ranks)}", "name"),
        _text(x + 12, EDGE + 38, why or kinds, "soft why" if why else "soft"),
    ]
    for row, (name, ranks) in enumerate(list(hosts.items())[:MOST_HOSTS]):
        parts += _host(name, ranks, x + 10, EDGE + HEAD + row * (HOST + 8))
    if len(hosts) > MOST_HOSTS:
        more = f"and {len(hosts) - MOST_HOSTS} more hosts"
        parts.append(_text(x + 12, EDGE + HEAD + MOST_HOSTS * (HOST + 8) + 12, more, "soft"))
    return Markup().join(parts)


def _host(name: str, ranks: Sequence[PlannedRank], x: int, y: int) -> Iterator[Markup]:
    """A machine: its devices above, its NICs on its lower edge."""
    yield _rect("host", x, y, ISLAND - 20, HOST, 5)
    nics = list(dict.fromkeys(nic for rank in ranks for nic in rank.nics))
    about = name + (f": {listed(nics, 2)}" if nics else "")
    yield _text(x + 10, y + 17, about if len(about) < 42 else about[:40] + "…", "soft")
    for k, rank in enumerate(ranks[:MOST_DEVICES]):
        idle = rank.replica is None
        tip = f"rank {rank.rank}: {rank.device_class}, device {rank.device} of {name}" + (", idle" if idle else "")
        yield _rect("device idle" if idle else "device", x + 10 + 19 * k, y + 26, 15, 20, 2, tip)
    for k, nic in enumerate(nics[:MOST_DEVICES]):
        yield _rect("nic", x + 10 + 19 * k, y + HOST - 5, 15, 8, 1, f"NIC {nic} of {name}")


def _bridges(
    plan: Plan, left: Mapping[str, int], base: int, slowest: Sequence[str], why: str
) -> tuple[list[Markup], float]:
    """All bridges below each other, each with its own places on its islands' lower edges; and where they end."""
    ends = {name: [b for b in plan.bridges if name in b.islands] for name in left}
    drawn, said, low = list[Markup](), list[Markup](), base + 14.0
    for bridge in plan.bridges:
        marked = set(slowest) == set(bridge.islands)
        at = [left[n] + ISLAND * (ends[n].index(bridge) + 1) / (len(ends[n]) + 1) for n in bridge.islands]
        lines, low = _rails(bridge, min(at), max(at), base, low + 20)
        words = _text(sum(at) / 2, low + 14, _rates(bridge) + (f": {why}" if marked else ""), "why", "middle")
        for part, into in ((lines, drawn), (words, said)):  # no line may cross what is said of another one
            into.append(Markup("<g class='bridge{}'>{}</g>").format(SLOWEST if marked else "", part))
        low += 18
    return [*drawn, *said], low + EDGE


def _rails(bridge: PlannedBridge, a: float, b: float, base: int, low: float) -> tuple[Markup, float]:
    """One line for each rail, its width by its rate, and where the lowest ends."""
    rails = bridge.rails[:MOST_RAILS]
    widths = [stroke_width(rail.rate_bytes_per_s) for rail in rails]
    parts, shift = Markup(), -sum(wide + 2 for wide in widths) / 2
    for rail, wide in zip(rails, widths, strict=True):
        path = f"M{a - shift:.1f} {base} C{a - shift:.1f} {low:.1f} {a:.1f} {low:.1f} {a + 40:.1f} {low:.1f}"
        path += f" H{b - 40:.1f} C{b:.1f} {low:.1f} {b + shift:.1f} {low:.1f} {b + shift:.1f} {base}"
        ends = ((rail.from_rank, rail.from_nic), (rail.to_rank, rail.to_nic))
        said = " to ".join(f"rank {rank}" + (f" by {nic}" if nic else "") for rank, nic in ends)
        tip = said + (f": {show_rate(rail.rate_bytes_per_s)}" if rail.rate_bytes_per_s else "")
        dashes = Markup("" if rail.rate_bytes_per_s else " stroke-dasharray='5 4'")  # unknown
        pattern = "<path class='rail' stroke-width='{:.1f}'{} d='{}'><title>{}</title></path>"
        parts += Markup(pattern).format(wide, dashes, path, tip)
        shift, low = shift + wide + 2, low + wide + 2
    return parts, low


def _rates(bridge: PlannedBridge) -> str:
    """What carries a bridge, over how many rails, and how fast together where that is known."""
    rates = [rail.rate_bytes_per_s for rail in bridge.rails]
    known = [rate for rate in rates if rate is not None]
    count = count_of(len(rates), "rail")
    total = [show_rate(sum(known))] if known and len(known) == len(rates) else []
    return ", ".join([bridge.transport, *([count] if rates else []), *total])


def stroke_width(bytes_per_s: float | None) -> float:
    """Pixels of a line: 1 up to 0.1 GB/s, 2.2 more for each ten times as much; unknown: 1.5, dashed."""
    if not bytes_per_s or bytes_per_s < 0:
        return 1.5
    return min(10.0, 1 + 2.2 * math.log10(max(bytes_per_s / 1e8, 1.0)))


def _rect(style: str, x: int, y: int, width: int, height: int, round_: int, tip: str = "") -> Markup:
    pattern = "<rect class='{}' x='{}' y='{}' width='{}' height='{}' rx='{}'>{}</rect>"
    title = Markup("<title>{}</title>").format(tip) if tip else ""
    return Markup(pattern).format(style, x, y, width, height, round_, title)


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> Markup:
    pattern = "<text class='{}' x='{:.0f}' y='{:.0f}' text-anchor='{}'>{}</text>"
    return Markup(pattern).format(style, x, y, anchor, words)
