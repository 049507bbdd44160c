"""One self-contained page of a plan: islands and rails drawn, the pipeline's timeline, memory bars, the numbers.

Everything is inline; the page opens without a network and without scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.contract.units import show_bytes, show_rate, show_seconds
from hetctl.render.advice import HEAD, advice_rows, advice_sentence
from hetctl.render.plan import show_ranks
from hetctl.render.trace import NAMES
from hetctl.trainer.planning.advise import Advised
from hetctl.trainer.planning.simulate import SimulatedSpan

WIDTH = 1080  # pixels of every drawing
MOST_BARS = 8000  # spans drawn; a longer step shows its beginning
COLOURS = {"F": "#4c78c9", "B": "#2a9d78", "W": "#8fbf6f", "send": "#c9a227", "sync": "#b0537d", "update": "#7d6bb3"}
STYLE = """
:root { color-scheme: light dark; --ink: #1d232b; --soft: #5b6672; --line: #d5dae0; --ground: #ffffff; --box: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa5b1; --line: #3a424c; --ground: #14181d; --box: #1e242b; }
}
body { margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: var(--ink); background: var(--ground);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.lead { color: var(--soft); margin: .2rem 0 1rem; }
dl { display: flex; flex-wrap: wrap; gap: .8rem; margin: 0; }
dl div { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); font-size: 11px; }
.box { fill: var(--box); stroke: var(--line); } .rail { stroke: #c9a227; fill: none; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
.wide { overflow-x: auto; } .key span { display: inline-block; margin-right: 1rem; color: var(--soft); }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .3rem; }
"""


def plan_page(
    plan: Plan,
    spans: Sequence[SimulatedSpan],
    *,
    explanation: Sequence[str] = (),
    advised: Advised | None = None,
    clones: int = 1,
) -> str:
    """The page's HTML. `spans` are of the simulated step; each simulated replica stands for `clones` of the plan."""
    title = f"{plan.model} on {plan.world_size} devices"
    lead = f"{plan.global_batch} samples of {plan.seq_len} tokens a step, {plan.schedule}"
    parts = [
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(lead)}</p>",
        _numbers(plan),
        "<h2>Islands and rails</h2>" + _islands(plan),
        "<h2>One step, simulated</h2>" + _timeline(plan, spans, clones),
        "<h2>Stages</h2>" + _stages(plan),
        "<h2>Memory per device</h2>" + _memory(plan),
        "<h2>Why</h2>" + _list(plan.reasons),
    ]
    if explanation:
        parts.append("<h2>What else, and what would help</h2>" + _list(explanation))
    if advised:
        bought = _table(HEAD, advice_rows(advised)) + f"<p class='lead'>{escape(advice_sentence(advised))}</p>"
        parts.append("<h2>What to buy, change or leave out</h2>" + bought)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _numbers(plan: Plan) -> str:
    p = plan.predicted
    if p is None:
        return ""
    rows = [
        ("step", show_seconds(p.step_time_s)),
        ("tokens/s", f"{p.tokens_per_s:,.0f}"),
        ("MFU", "unknown" if p.mfu is None else f"{p.mfu:.1%}"),
        ("efficiency", "unknown" if p.efficiency is None else f"{p.efficiency:.1%}"),
        ("bubbles", f"{p.bubble_share:.1%}"),
        ("bridge", f"{p.bridge_share:.1%}"),
        ("bound, tokens/s", "unknown" if p.bound_tokens_per_s is None else f"{p.bound_tokens_per_s:,.0f}"),
        ("basis", p.basis),
    ]
    return "<dl>" + "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in rows) + "</dl>"


def _islands(plan: Plan) -> str:
    """Islands as boxes side by side, bridges as arcs below them, one line per rail up to twelve."""
    count = len(plan.islands)
    gap = 70
    width = min(260.0, (WIDTH - gap * (count - 1)) / count)
    left = (WIDTH - count * width - (count - 1) * gap) / 2
    centres: dict[str, float] = {}
    drawn = []
    for index, island in enumerate(plan.islands):
        x = left + index * (width + gap)
        centres[island.name] = x + width / 2
        idle = sum(plan.ranks[r].replica is None for r in island.ranks)
        hosts = len({plan.ranks[r].host for r in island.ranks})
        lines = [
            island.vendor + ": " + " + ".join(island.device_classes),
            f"{len(island.ranks)} devices on {hosts} host{'s' if hosts > 1 else ''}, {island.fabric}",
            f"ranks {show_ranks(island.ranks)}" + (f", {idle} idle" if idle else ""),
        ]
        drawn.append(f"<rect class='box' x='{x:.0f}' y='10' width='{width:.0f}' height='92' rx='8'/>")
        drawn.append(f"<text x='{x + 12:.0f}' y='33' style='font-weight:600'>{escape(island.name)}</text>")
        for row, line in enumerate(lines):
            drawn.append(f"<text class='soft' x='{x + 12:.0f}' y='{54 + 17 * row}'>{escape(line)}</text>")
    depth = 0.0
    for number, bridge in enumerate(plan.bridges):
        a, b = (centres[name] for name in bridge.islands)
        low = 102 + 44 + 30 * number
        depth = max(depth, low)
        shown = min(12, len(bridge.rails))
        for k in range(shown):
            shift = (k - (shown - 1) / 2) * 3
            path = f"M{a + shift:.1f} 102 C{a + shift:.1f} {low + shift:.1f} {b + shift:.1f} {low + shift:.1f}"
            drawn.append(f"<path class='rail' d='{path} {b + shift:.1f} 102'/>")
        rates = [r.rate_bytes_per_s for r in bridge.rails]
        total = sum(r for r in rates if r is not None) if None not in rates else None
        label = f"{bridge.transport}, {len(bridge.rails)} rails, {show_rate(total)}"
        drawn.append(f"<text x='{(a + b) / 2:.0f}' y='{low + 10:.0f}' text-anchor='middle'>{escape(label)}</text>")
    height = max(112.0, depth + 20)
    return f"<svg viewBox='0 0 {WIDTH} {height:.0f}' role='img'>{''.join(drawn)}</svg>"


def _timeline(plan: Plan, spans: Sequence[SimulatedSpan], clones: int) -> str:
    """A row per stage; transfers are thin bars under the stage that sends them."""
    if not spans:
        return "<p>Nothing was simulated.</p>"
    shown = sorted(spans, key=lambda s: s.start_s)[:MOST_BARS]
    until = max(s.end_s for s in shown)
    rows: dict[tuple[int, int], int] = {}
    for number in range(0, len(plan.replicas), clones):
        for index in range(len(plan.replicas[number].stages)):
            rows[number // clones, index] = len(rows)
    left, row_height = 150, 40
    scale = (WIDTH - left - 10) / until
    drawn = []
    for (number, index), row in rows.items():
        stage = plan.replicas[number * clones].stages[index]
        label = f"{plan.ranks[stage.ranks[0]].island}, stage {index}"
        drawn.append(f"<text x='0' y='{row * row_height + 22}'>{escape(label)}</text>")
        layers = f"layers {stage.layers[0]}-{stage.layers[1] - 1}"
        drawn.append(f"<text class='soft' x='0' y='{row * row_height + 36}'>{layers}</text>")
    for span in shown:
        y, height = rows[span.replica, span.stage] * row_height + 8, 20
        if span.kind == "send":
            y, height = y + 22, 4
        x, width = left + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.3)
        what = NAMES[span.kind] + ("" if span.micro_batch is None else f" of micro-batch {span.micro_batch}")
        tip = f"{what}: {show_seconds(span.end_s - span.start_s)} from {show_seconds(span.start_s)}"
        drawn.append(
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{height}' fill='{COLOURS[span.kind]}'"
            f" stroke='var(--ground)' stroke-width='.4'><title>{escape(tip)}</title></rect>"
        )
    base = len(rows) * row_height + 6
    for tick in range(6):
        x = left + until * tick / 5 * scale
        anchor = "end" if tick == 5 else "middle"
        text = show_seconds(until * tick / 5)
        drawn.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='4' y2='{base}' stroke='var(--line)' stroke-width='.5'/>")
        drawn.append(f"<text class='soft' x='{x:.1f}' y='{base + 14}' text-anchor='{anchor}'>{text}</text>")
    key = "".join(f"<span><i style='background:{c}'></i>{NAMES[k]}</span>" for k, c in COLOURS.items())
    cut = "" if len(shown) == len(spans) else f"<p class='lead'>The first {show_seconds(until)} of the step.</p>"
    return f"<p class='key'>{key}</p>{cut}<svg viewBox='0 0 {WIDTH} {base + 20}' role='img'>{''.join(drawn)}</svg>"


def _stages(plan: Plan) -> str:
    head = (
        "replica",
        "stage",
        "island",
        "ranks",
        "layers",
        "tensor",
        "shards",
        "micro-batches",
        "recompute",
        "offload",
    )
    rows = []
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            cells = (
                number,
                index,
                plan.ranks[stage.ranks[0]].island,
                show_ranks(stage.ranks),
                f"{stage.layers[0]}-{stage.layers[1] - 1} ({stage.layers[1] - stage.layers[0]})",
                stage.tensor_parallel,
                stage.shards,
                f"{stage.micro_batches} x {stage.micro_batch_size}",
                stage.recompute,
                _on_host(stage),
            )
            rows.append(cells)
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    titles = "".join(f"<th>{escape(t)}</th>" for t in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>" for cells in rows)
    return f"<div class='wide'><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"


def _on_host(stage: Stage) -> str:
    named = (("optimiser state", stage.offload), ("activations", stage.offload_activations))
    return ", ".join(what for what, there in named if there) or "none"


def _memory(plan: Plan) -> str:
    """A bar per stage: what its devices need of what they have; equal devices share a bar."""
    if plan.predicted is None:
        return "<p>Not predicted.</p>"
    bars: dict[tuple[str, int, int | None], list[int]] = {}
    for rank in plan.ranks:
        key = (rank.island, plan.predicted.memory_bytes[rank.rank], rank.memory_bytes)
        bars.setdefault(key, []).append(rank.rank)
    most = max((key[2] or key[1] for key in bars), default=1) or 1
    left, scale = 260, (WIDTH - 430) / most
    drawn = []
    for row, ((island, need, have), ranks) in enumerate(bars.items()):
        y = row * 26
        label = f"{island}, ranks {show_ranks(ranks)}"
        label = label if len(label) < 40 else label[:38] + "…"
        drawn.append(f"<text x='0' y='{y + 16}'>{escape(label)}</text>")
        if have:
            drawn.append(f"<rect class='box' x='{left}' y='{y + 3}' width='{have * scale:.1f}' height='18' rx='3'/>")
        drawn.append(
            f"<rect x='{left}' y='{y + 3}' width='{need * scale:.1f}' height='18' rx='3' fill='{COLOURS['F']}'/>"
        )
        end = left + max(need, have or 0) * scale + 8
        drawn.append(
            f"<text x='{end:.0f}' y='{y + 16}'>{show_bytes(need) if need else 'idle, 0'} of {show_bytes(have)}</text>"
        )
    return f"<svg viewBox='0 0 {WIDTH} {26 * len(bars) + 4}' role='img'>{''.join(drawn)}</svg>"


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>"
