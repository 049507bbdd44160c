"""A plan's cluster as a picture: islands of machines with their devices and NICs, links as wide as they are fast.

Hand-made SVG: no chart library draws this. Colours are page.css's, by vendor; what limits a step is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from hetctl.comm.contract.plan import Plan, PlannedBridge, PlannedIsland, PlannedRank
from hetctl.comm.contract.units import count_of, listed, show_rate
from hetctl.render.page import scrolled
from hetctl.render.plan import named_ranks

ISLAND, GAP, EDGE = 290, 60, 12  # pixels
HOST, HEAD = 62, 52
MOST_HOSTS = 3  # of an island that are drawn; the others are counted
MOST_DEVICES, MOST_RAILS = 14, 4


def cluster_picture(plan: Plan, slowest: Sequence[str] = (), why: str = "") -> str:
    """The picture. `slowest` is the island, or the two that a bridge joins, that limits a step; `why` says how."""
    tall = max(_height(plan, island) for island in plan.islands)
    left = {island.name: EDGE + i * (ISLAND + GAP) for i, island in enumerate(plan.islands)}
    width = 2 * EDGE + len(left) * (ISLAND + GAP) - GAP
    drawn = []
    for island in plan.islands:
        marked = list(slowest) == [island.name]
        box = _island(plan, island, left[island.name], tall, why if marked else "")
        drawn.append(f"<g class='vendor-{escape(island.vendor)}{' slowest' if marked else ''}'>{box}</g>")
    bridges, height = _bridges(plan, left, tall + EDGE, slowest, why)
    label = "cluster: " + "; ".join(_said(plan, island) for island in plan.islands)
    size = f"viewBox='0 0 {width} {height:.0f}' width='{width}'"
    svg = f"<svg class='cluster' {size} role='img' aria-label='{escape(label)}'>{''.join([*drawn, *bridges])}</svg>"
    return scrolled(svg, "the cluster")


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


def _island(plan: Plan, island: PlannedIsland, x: int, tall: int, why: str) -> str:
    hosts = _hosts(plan, island)
    kinds = f"{island.vendor}: {' + '.join(island.device_classes)}, {island.fabric}"
    parts = [
        f"<rect class='box' x='{x}' y='{EDGE}' width='{ISLAND}' height='{tall}' rx='8'/>",
        _text(x + 12, EDGE + 20, f"{island.name}: {named_ranks(island.ranks)}", "name"),
        _text(x + 12, EDGE + 38, why or kinds, "soft why" if why else "soft"),
    ]
    for row, (name, ranks) in enumerate(list(hosts.items())[:MOST_HOSTS]):
        parts += _host(name, ranks, x + 10, EDGE + HEAD + row * (HOST + 8))
    if len(hosts) > MOST_HOSTS:
        more = f"and {len(hosts) - MOST_HOSTS} more hosts"
        parts.append(_text(x + 12, EDGE + HEAD + MOST_HOSTS * (HOST + 8) + 12, more, "soft"))
    return "".join(parts)


def _host(name: str, ranks: Sequence[PlannedRank], x: int, y: int) -> Iterator[str]:
    """A machine: its devices above, its NICs on its lower edge."""
    yield f"<rect class='host' x='{x}' y='{y}' width='{ISLAND - 20}' height='{HOST}' rx='5'/>"
    nics = list(dict.fromkeys(nic for rank in ranks for nic in rank.nics))
    about = name + (f": {listed(nics, 2)}" if nics else "")
    yield _text(x + 10, y + 17, about if len(about) < 42 else about[:40] + "…", "soft")
    for k, rank in enumerate(ranks[:MOST_DEVICES]):
        idle = rank.replica is None
        tip = f"rank {rank.rank}: {rank.device_class}, device {rank.device} of {name}" + (", idle" if idle else "")
        place = f"x='{x + 10 + 19 * k}' y='{y + 26}' width='15' height='20' rx='2'"
        yield f"<rect class='device{' idle' if idle else ''}' {place}><title>{escape(tip)}</title></rect>"
    for k, nic in enumerate(nics[:MOST_DEVICES]):
        place = f"x='{x + 10 + 19 * k}' y='{y + HOST - 5}' width='15' height='8' rx='1'"
        yield f"<rect class='nic' {place}><title>{escape(f'NIC {nic} of {name}')}</title></rect>"


def _bridges(
    plan: Plan, left: Mapping[str, int], base: int, slowest: Sequence[str], why: str
) -> tuple[list[str], float]:
    """All bridges below each other, each with its own places on its islands' lower edges; and where they end."""
    ends = {name: [b for b in plan.bridges if name in b.islands] for name in left}
    drawn, said, low = list[str](), list[str](), base + 14.0
    for bridge in plan.bridges:
        marked = set(slowest) == set(bridge.islands)
        at = [left[n] + ISLAND * (ends[n].index(bridge) + 1) / (len(ends[n]) + 1) for n in bridge.islands]
        lines, low = _rails(bridge, min(at), max(at), base, low + 20)
        words = _text(sum(at) / 2, low + 14, _rates(bridge) + (f": {why}" if marked else ""), "why", "middle")
        for part, into in ((lines, drawn), (words, said)):  # no line may cross what is said of another one
            into.append(f"<g class='bridge{' slowest' if marked else ''}'>{part}</g>")
        low += 18
    return [*drawn, *said], low + EDGE


def _rails(bridge: PlannedBridge, a: float, b: float, base: int, low: float) -> tuple[str, float]:
    """One line for each rail, its width by its rate, and where the lowest ends."""
    rails = bridge.rails[:MOST_RAILS]
    widths = [stroke_width(rail.rate_bytes_per_s) for rail in rails]
    parts, shift = "", -sum(wide + 2 for wide in widths) / 2
    for rail, wide in zip(rails, widths, strict=True):
        path = f"M{a - shift:.1f} {base} C{a - shift:.1f} {low:.1f} {a:.1f} {low:.1f} {a + 40:.1f} {low:.1f}"
        path += f" H{b - 40:.1f} C{b:.1f} {low:.1f} {b + shift:.1f} {low:.1f} {b + shift:.1f} {base}"
        ends = ((rail.from_rank, rail.from_nic), (rail.to_rank, rail.to_nic))
        said = " to ".join(f"rank {rank}" + (f" by {nic}" if nic else "") for rank, nic in ends)
        tip = escape(said + (f": {show_rate(rail.rate_bytes_per_s)}" if rail.rate_bytes_per_s else ""))
        unknown = "" if rail.rate_bytes_per_s else " stroke-dasharray='5 4'"
        parts += f"<path class='rail' stroke-width='{wide:.1f}'{unknown} d='{path}'><title>{tip}</title></path>"
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
    return min(10.0, 1 + 2.2 * max(0.0, math.log10(bytes_per_s / 1e8)))


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    return f"<text class='{style}' x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}'>{escape(words)}</text>"
