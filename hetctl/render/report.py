"""`report.html` of a run: loss, throughput, who does what, and the timeline of one step. One file, no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from hetctl.comm.contract.files import write_atomically
from hetctl.comm.contract.plan import Plan, load_plan
from hetctl.comm.contract.units import show_bytes, show_seconds
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.run import show_efficiency

WIDTH, HEIGHT, ROW = 900, 220, 22
SHARES = ("compute", "bubble", "bridge", "native", "update")  # of a step, as the summary names them
COLORS = {
    "F": "#4c78a8",
    "B": "#72b7b2",
    "W": "#9ecae9",
    "wait-F": "#f2cf5b",
    "wait-B": "#f2cf5b",
    "sync": "#e45756",
    "weights": "#f58518",
    "world": "#d0d0d0",
    "update": "#b279a2",
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "wait-F": "waiting for a stage",
    "sync": "gradient sums",
    "weights": "waiting for weights",
    "world": "the step's figures",
    "update": "optimiser",
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hetctl run {name}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:960px;color:#222;background:#fff}}
table{{border-collapse:collapse;margin:.5em 0 1.5em}}td,th{{padding:.2em .9em .2em 0;text-align:left;
border-bottom:1px solid #e5e5e5;vertical-align:top}}svg{{width:100%;height:auto}}h2{{margin-top:1.6em}}
.key span{{display:inline-block;margin-right:1.2em}}.key i{{display:inline-block;width:.9em;height:.9em;
margin-right:.35em;vertical-align:-.1em}}</style>
<h1>{name}: {status}</h1>{figures}<h2>Loss</h2>{loss}<h2>Tokens per second</h2>{rate}
<h2>Islands</h2>{islands}<h2>One step</h2>{key}{timeline}<h2>Why so</h2><ul>{reasons}</ul></html>
"""


def write_report(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write the run's report.html atomically, from its plan, metrics and summary. Raises OSError and ConfigError."""
    plan, metrics = load_plan(folder.plan), folder.read_metrics()
    page = _PAGE.format(
        name=html.escape(folder.name),
        status=html.escape(summary["status"]),
        figures=_figures(summary),
        loss=_line([(m["step"], m.get("loss")) for m in metrics], "#4c78a8"),
        rate=_line([(m["step"], m.get("tokens_per_s")) for m in metrics], "#54a24b"),
        islands=_islands(plan, summary),
        key=_key(),
        timeline=_timeline(summary.get("timeline") or [], plan),
        reasons="".join(f"<li>{html.escape(r)}</li>" for r in plan.reasons),
    )
    write_atomically(folder.report, page)


def describe_islands(
    plan: Plan, shares: Mapping[str, Any] | None = None, memory: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Each island with its ranks, the layers it holds, where its time went, and the most memory on any rank."""
    described = []
    for island in plan.islands:
        spans = [s.layers for r in plan.replicas for s in r.stages if set(s.ranks) & set(island.ranks)]
        described.append(
            {
                "name": island.name,
                "vendor": island.vendor,
                "ranks": list(island.ranks),
                "layers": sorted({tuple(span) for span in spans}),
                "shares": (shares or {}).get(island.name),
                "memory_bytes": max(memory[r] for r in island.ranks) if memory else None,
            }
        )
    return described


def _figures(summary: dict[str, Any]) -> str:
    def show(value: Any, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    rows = (
        ("model", f"{summary['model']}, {show(summary['parameters'], ',')} parameters"),
        ("steps", f"{summary['steps']} of {show(summary['steps_planned'], 'd')}"),
        ("loss", f"{show(summary['first_loss'], '.4f')} to {show(summary['last_loss'], '.4f')}"),
        ("validation loss", show(summary.get("validation_loss"), ".4f")),
        ("tokens per second", show(summary.get("tokens_per_s"), ",.0f")),
        ("MFU", show(summary.get("mfu"), ".1%")),
        ("efficiency", show_efficiency(summary)),
        ("over the bridge", show_bytes(summary.get("bridge_bytes"))),
        ("lost to the bubble", show(summary.get("bubble_share"), ".1%")),
        ("lost to the bridge", show(summary.get("bridge_share"), ".1%")),
        ("wall time", "unknown" if summary["wall_s"] is None else show_seconds(summary["wall_s"])),
    )
    return "<table>" + "".join(f"<tr><th>{k}<td>{html.escape(v)}" for k, v in rows) + "</table>"


def _islands(plan: Plan, summary: dict[str, Any]) -> str:
    rows = "<tr><th>island<th>vendor<th>ranks<th>layers<th>" + "<th>".join((*SHARES, "memory"))
    for island in summary["islands"]:
        layers = ", ".join(f"{a}-{b - 1}" for a, b in island["layers"]) or "idle"
        ranks = ", ".join(map(str, island["ranks"]))
        own = island.get("shares") or {}
        figures = ["unknown" if own.get(name) is None else f"{own[name]:.1%}" for name in SHARES]
        cells = (html.escape(island["name"]), html.escape(island["vendor"]), ranks, layers, *figures)
        rows += "<tr>" + "".join(f"<td>{c}" for c in (*cells, show_bytes(island.get("memory_bytes"))))
    ways = "".join(
        f"<li>{html.escape(' and '.join(b.islands))}: {b.transport} ({html.escape(b.reason)})" for b in plan.bridges
    )
    label = "<p>Emulated on one machine: labels decide who may talk natively.</p>" if summary["emulated"] else ""
    return f"{label}<table>{rows}</table><ul>{ways}</ul>"


def _line(points: Sequence[tuple[float, float | None]], color: str) -> str:
    known = [(x, y) for x, y in points if y is not None]
    if len(known) < 2:
        return "<p>too few steps to draw</p>"
    xs, ys = [p[0] for p in known], [p[1] for p in known]
    low, high = min(ys), max(ys)
    span_x, span_y = (max(xs) - min(xs)) or 1, (high - low) or 1

    def at(x: float, y: float) -> str:
        return f"{50 + (x - min(xs)) / span_x * (WIDTH - 60):.1f},{10 + (high - y) / span_y * (HEIGHT - 40):.1f}"

    path = " ".join(at(x, y) for x, y in known)
    marks = "".join(
        f'<text x="2" y="{y:.0f}" font-size="12" fill="#666">{_tick(v)}</text>'
        for v, y in ((high, 16), (low, HEIGHT - 26))
    )
    ends = "".join(
        f'<text x="{x}" y="{HEIGHT - 6}" font-size="12" fill="#666" text-anchor="{a}">step {v:.0f}</text>'
        for v, x, a in ((min(xs), 50, "start"), (max(xs), WIDTH - 10, "end"))
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><polyline fill="none" stroke="{color}" stroke-width="2" '
        f'points="{path}"/>{marks}{ends}</svg>'
    )


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _key() -> str:
    items = "".join(f'<span><i style="background:{COLORS[k]}"></i>{v}</span>' for k, v in MEANINGS.items())
    return f'<p class="key">{items}</p>'


def _timeline(ranks: Sequence[Sequence[dict[str, Any]]], plan: Plan) -> str:
    spans = [s for rank in ranks for s in rank]
    if not spans:
        return "<p>no step was recorded</p>"
    begin, end = min(s["start"] for s in spans), max(s["end"] for s in spans)
    scale = (WIDTH - 130) / ((end - begin) or 1)
    parts = []
    for rank, own in enumerate(ranks):
        y = rank * ROW
        label = html.escape(f"{rank} {plan.ranks[rank].device_class}")
        parts.append(f'<text x="0" y="{y + 15}" font-size="12">{label}</text>')
        for s in own:
            x, width = 120 + (s["start"] - begin) * scale, max(0.4, (s["end"] - s["start"]) * scale)
            title = f"{s['kind']} {s['micro_batch']}: {show_seconds(s['end'] - s['start'])}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{COLORS[s["kind"]]}">'
                f"<title>{title}</title></rect>"
            )
    height = len(ranks) * ROW + 20
    parts.append(f'<text x="120" y="{height - 4}" font-size="12" fill="#666">{show_seconds(end - begin)} in all</text>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
