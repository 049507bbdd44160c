"""The skeleton that all pages share: one file that opens without a network, in light and dark, on phones and on paper.

Styles, scripts and the chart library (uPlot, MIT) are written into the page. A section without content is left out.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Literal

Tone = Literal["good", "bad", "plain"]
Points = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """One line of a chart: its values at the chart's steps, None where there is none; `colour` is a variable of
    page.css."""

    label: str
    y: Points
    colour: str = "--accent"
    faint: bool = False
    points: bool = False


def page(
    title: str,
    verdict: str,
    sections: Iterable[tuple[str, str]],
    *,
    tone: Tone = "plain",
    lead: str = "",
    follow_s: float | None = None,
) -> str:
    """The page's HTML: a verdict sentence, then the sections (heading, HTML) that hold something.

    `follow_s`: where it is served, how often it looks for a newer one.
    """
    body = "".join(f"<section><h2>{escape(head)}</h2>{inner}</section>" for head, inner in sections if inner)
    charts = follow_s or "class='chart'" in body  # a run that is followed may have its first steps yet to come
    style = _asset("page.css") + (_asset("uPlot.min.css") if charts else "")
    script = (_asset("uPlot.iife.min.js") if charts else "") + _asset("page.js")
    follows = f" data-follow='{follow_s}'" if follow_s else ""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_policy(script)}\"><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<style>{style}</style></head><body{follows}><main><h1>{escape(title)}</h1>"
        f"<p class='verdict {tone}'>{escape(verdict)}</p>{paragraph(lead)}{body}</main><script>{script}</script>"
        "</body></html>\n"
    )


def numbers(rows: Iterable[tuple[str, str | None]]) -> str:
    """Figures as tiles; those that are None are left out."""
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rows if v) + "</dl>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls where it is too wide; empty without rows."""
    titles = "".join(f"<th scope='col'>{escape(t)}</th>" for t in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>" for cells in rows)
    found = f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
    return scrolled(found, f"table of {head[0]}, {', '.join(head[1:])}") if lines else ""


def scrolled(inner: str, label: str) -> str:
    """What may be wider than the page, reachable by keyboard."""
    return f"<div class='wide' tabindex='0' role='region' aria-label='{escape(label)}'>{inner}</div>"


def bullets(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(s)}</li>" for s in sentences)
    return f"<ul>{items}</ul>" if items else ""


def paragraph(text: str) -> str:
    return f"<p class='lead'>{escape(text)}</p>" if text else ""


def command(words: str) -> str:
    """A command line with a button that copies it."""
    return f"<div class='command'><code>{escape(words)}</code></div>"


def key(colours: Mapping[str, str]) -> str:
    """What the colours mean."""
    items = "".join(f"<span><i style='background:{c}'></i>{escape(word)}</span>" for word, c in colours.items())
    return f"<p class='key'>{items}</p>"


def chart(label: str, steps: Sequence[int], lines: Sequence[Line], *, unit: str = "") -> str:
    """A line chart over steps; empty where fewer than two are known."""
    known = [line for line in lines if any(y is not None for y in line.y)]
    if len(steps) < 2 or not known:
        return ""
    about = {"x": steps, "unit": unit, "series": [vars(line) for line in known]}
    data = json.dumps(about, allow_nan=False).replace("<", "\\u003c")
    values = f"<script type='application/json'>{data}</script>"
    return f"<div class='chart' role='group' aria-label='{escape(label)}'>{values}</div>"


def _policy(script: str) -> str:
    """What the page may do: its own script and no other, styles of its own, a look at where it came from."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    return (files("hetctl.render") / "assets" / name).read_text(encoding="utf-8")
