"""Plots of records as plain SVG, on a card of their own so that they can be read in light and dark.

A record has a title, rows, and a plot: its kind, its caption, and which of the rows' values it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, HEAD, LEFT = 860, 26, 48, 420
STYLE = """<style>
.card{fill:#fff;stroke:#d0d7de}.text{fill:#1f2328}.soft{fill:#57606a}.axis{stroke:#8c959f}.grid{stroke:#d8dee4}
.bar{fill:#8fb8f0}.less{fill:#d0d7de}.range{stroke:#1f2328;stroke-width:1.5}.mark{stroke:#a8443a;stroke-dasharray:4 3}
.c0{stroke:#3f7d3f;fill:#3f7d3f}.c1{stroke:#3b6fc4;fill:#3b6fc4}.c2{stroke:#b06a00;fill:#b06a00}.c3{stroke:#7a4fc0;fill:#7a4fc0}
.line{fill:none;stroke-width:2}
@media (prefers-color-scheme: dark){
.card{fill:#0d1117;stroke:#30363d}.text{fill:#e6edf3}.soft{fill:#9da7b3}.axis{stroke:#6e7681}.grid{stroke:#21262d}
.bar{fill:#2f5f9e}.less{fill:#3b434d}.range{stroke:#e6edf3}.mark{stroke:#e5857b}
.c0{stroke:#6fbf73;fill:#6fbf73}.c1{stroke:#6ea8fe;fill:#6ea8fe}.c2{stroke:#e0a458;fill:#e0a458}.c3{stroke:#b794f4;fill:#b794f4}
.line{fill:none}}
</style>"""


def drawn(record: dict[str, Any]) -> str:
    plot = record["plot"]
    kinds = {"bars": _bars, "lines": _lines, "scatter": _scatter}
    height, parts = kinds[plot["kind"]](record["rows"], plot)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">'
    )
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    title = f"<title>{escape(record['title'])}</title>"
    return "\n".join([head, title, STYLE, card, _text(20, 28, plot["caption"], "soft"), *parts, "</svg>", ""])


def spread(value: dict[str, Any] | float) -> tuple[float | None, float | None, float | None]:
    """Median, least and most of a cell."""
    if not isinstance(value, dict):
        return value, None, None
    if samples := value.get("samples"):
        return median(samples), min(samples), max(samples)
    return value.get("median"), value.get("min"), value.get("max")


def _bars(rows: list[dict[str, Any]], plot: dict[str, Any]) -> tuple[int, list[str]]:
    """A bar a row, with its range, and a line where the aim or the yardstick is."""
    drawn_rows = [(row, *spread(row[plot["value"]])) for row in rows if plot["value"] in row]
    top = 1.04 * max(most or middle or 0.0 for _, middle, _, most in drawn_rows)

    def x(value: float) -> float:
        return LEFT + value / top * (WIDTH - LEFT - 80)

    parts = []
    for i, (row, middle, least, most) in enumerate(drawn_rows):
        y = HEAD + i * ROW
        label = ", ".join(str(row[name]) for name in plot["labels"])
        kind = "less" if "naive" in label or "native" in label else "bar"
        parts += [_text(LEFT - 10, y + 14, label, end=True)]
        parts += [f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{x(middle or 0.0) - LEFT:.1f}" height="18" rx="2"/>']
        if least is not None and most is not None:
            parts += [f'<path class="range" d="M{x(least):.1f} {y + 9} H{x(most):.1f}"/>']
        parts += [_text(WIDTH - 20, y + 14, f"{middle:.3g}" if top > 2 else f"{middle:.3f}", end=True)]
    end = HEAD + len(drawn_rows) * ROW
    parts += [f'<path class="mark" d="M{x(plot["line"]):.1f} {HEAD - 6} V{end}"/>']
    return end + 14, parts


def _lines(rows: list[dict[str, Any]], plot: dict[str, Any]) -> tuple[int, list[str]]:
    """One line a series over the rows, the values' axis logarithmic."""
    left, right, top, bottom = 70, 640, HEAD, 300
    values = [row[name] for row in rows for name in plot["series"]]
    y = _scale(min(values), max(values), bottom, top)
    xs = [left + i * (right - left) / (len(rows) - 1) for i in range(len(rows))]
    parts, label = [_grid(y, tick, left, right) for tick in _ticks(min(values), max(values))], 0.0
    names = [str(row[plot["x"]]) for row in rows]
    parts += [_text(at, bottom + 22, name, "soft", middle=True) for at, name in zip(xs, names, strict=True)]
    for i, name in enumerate(plot["series"]):
        points = [(at, y(row[name])) for at, row in zip(xs, rows, strict=True)]
        parts += [f'<polyline class="c{i} line" style="fill:none" points="{_joined(points)}"/>']
        parts += [f'<circle class="c{i}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in points]
        label = max(points[-1][1] + 4, label + 17)  # series come from the highest down
        parts += [_text(right + 14, label, f"{name.partition(': ')[2]} {rows[-1][name]:g}")]
    return bottom + 40, parts


def _scatter(rows: list[dict[str, Any]], plot: dict[str, Any]) -> tuple[int, list[str]]:
    """A dot a row beside the diagonal on which both are equal, and the `band` around it where the plot has one."""
    left, right, top, bottom = 70, 560, HEAD, 440
    pairs = [(row[plot["x"]], spread(row[plot["y"]])[0] or 0.0) for row in rows]
    least, most = 0.9 * min(map(min, pairs)), 1.1 * max(map(max, pairs))
    x, y = _scale(least, most, left, right), _scale(least, most, bottom, top)
    parts = [_grid(y, tick, left, right) for tick in _ticks(least, most)]
    parts += [_text(x(tick), bottom + 20, f"{tick:g}", "soft", middle=True) for tick in _ticks(least, most)]
    for off in (-plot["band"], plot["band"]) if "band" in plot else (0.0,):
        ends = (x(least), y(least * (1 + off))), (x(most), y(most * (1 + off)))
        parts += [f'<path class="mark" d="M{ends[0][0]:.1f} {ends[0][1]:.1f} L{ends[1][0]:.1f} {ends[1][1]:.1f}"/>']
    kinds = plot.get("kinds", {})
    for row, (a, b) in zip(rows, pairs, strict=True):
        colour = f"c{list(kinds).index(row['kind'])}" if kinds else "c1"
        parts += [f'<circle class="{colour}" fill-opacity=".75" cx="{x(a):.1f}" cy="{y(b):.1f}" r="4.5"/>']
    for i, name in enumerate(kinds.values()):
        parts += [f'<circle class="c{i}" cx="{right + 24}" cy="{top + 56 + 22 * i}" r="4.5"/>']
        parts += [_text(right + 36, top + 60 + 22 * i, name)]
    parts += [_text(right + 16, bottom, plot["x"], "soft"), _text(right + 16, top + 12, plot["y"], "soft")]
    return bottom + 36, parts


def _scale(least: float, most: float, start: float, end: float) -> Callable[[float], float]:
    span = math.log(most / least)
    return lambda value: start + math.log(value / least) / span * (end - start)


def _ticks(least: float, most: float) -> list[float]:
    for digits in ((1, 2, 3, 5), (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [d * 10.0**p for p in range(-3, 7) for d in digits if least <= d * 10.0**p <= most]
        if len(ticks) > 1:
            break
    return ticks


def _grid(y: Callable[[float], float], tick: float, left: float, right: float) -> str:
    line = f'<path class="grid" d="M{left} {y(tick):.1f} H{right}"/>'
    return line + _text(left - 8, y(tick) + 4, f"{tick:g}", "soft", end=True)


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _text(x: float, y: float, text: str, kind: str = "text", *, end: bool = False, middle: bool = False) -> str:
    anchor = "end" if end else "middle" if middle else "start"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
