"""The skeleton that all pages share: one file that opens without a network, in light and dark, on phones and on paper.

Styles, scripts and the chart library (uPlot, MIT) are written into the page. A section without content is left out.
What is HTML is Markup, which escapes all else that is put into it: no text of a run becomes part of a page's markup.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Literal

from markupsafe import Markup

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
    sections: Iterable[tuple[str, Markup]],
    *,
    tone: Tone = "plain",
    lead: str = "",
    follow_s: float | None = None,
) -> str:
    """The page's HTML: a verdict sentence, then the sections (heading, HTML) that hold something.

    `follow_s`: where it is served, how often it looks for a newer one.
    """
    section = Markup("<section><h2>{}</h2>{}</section>")
    body = Markup().join(section.format(head, inner) for head, inner in sections if inner)
    charts = follow_s or "class='chart'" in body  # a run that is followed may have its first steps yet to come
    style = _asset("page.css") + (_asset("uPlot.min.css") if charts else "")
    script = (_asset("uPlot.iife.min.js") if charts else "") + _asset("page.js")
    return Markup(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content='{policy}'><title>{title}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        "<style>{style}</style></head><body{follows}><main><h1>{title}</h1>"
        "<p class='verdict {tone}'>{verdict}</p>{lead}{body}</main><script>{script}</script>"
        "</body></html>\n"
    ).format(
        policy=_policy(script),
        title=title,
        style=Markup(style),
        follows=Markup(" data-follow='{}'").format(follow_s) if follow_s else "",
        tone=tone,
        verdict=verdict,
        lead=paragraph(lead),
        body=body,
        script=Markup(script),
    )


def each(pattern: str, rows: Iterable[Sequence[object]]) -> Markup:
    """A pattern of HTML once for each row, whose values fill its braces."""
    return Markup().join(Markup(pattern).format(*row) for row in rows)


def numbers(rows: Iterable[tuple[str, str | None]]) -> Markup:
    """Figures as tiles; those that are None are left out."""
    tiles = each("<div><dt>{}</dt><dd>{}</dd></div>", (row for row in rows if row[1]))
    return Markup("<dl>{}</dl>").format(tiles)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table that scrolls where it is too wide; empty without rows."""
    lines = each("<tr>{}</tr>", ((each("<td>{}</td>", ((c,) for c in cells)),) for cells in rows))
    if not lines:
        return lines
    titles = each("<th scope='col'>{}</th>", ((t,) for t in head))
    found = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(titles, lines)
    return scrolled(found, f"table of {head[0]}, {', '.join(head[1:])}")


def scrolled(inner: Markup, label: str) -> Markup:
    """What may be wider than the page, reachable by keyboard."""
    return Markup("<div class='wide' tabindex='0' role='region' aria-label='{}'>{}</div>").format(label, inner)


def bullets(sentences: Iterable[str]) -> Markup:
    items = each("<li>{}</li>", ((s,) for s in sentences))
    return Markup("<ul>{}</ul>").format(items) if items else items


def paragraph(text: str) -> Markup:
    return Markup("<p class='lead'>{}</p>").format(text) if text else Markup()


def command(words: str) -> Markup:
    """A command line with a button that copies it."""
    return Markup("<div class='command'><code>{}</code></div>").format(words)


def key(colours: Mapping[str, str]) -> Markup:
    """What the colours mean."""
    items = each("<span><i style='background:{1}'></i>{0}</span>", colours.items())
    return Markup("<p class='key'>{}</p>").format(items)


def chart(label: str, steps: Sequence[int], lines: Sequence[Line], *, unit: str = "") -> Markup:
    """A line chart over steps; empty where fewer than two are known."""
    known = [line for line in lines if any(y is not None for y in line.y)]
    if len(steps) < 2 or not known:
        return Markup()
    about = {"x": steps, "unit": unit, "series": [vars(line) for line in known]}
    data = Markup(json.dumps(about, allow_nan=False).replace("<", "\\u003c"))  # inside of a script nothing else ends it
    pattern = "<div class='chart' role='group' aria-label='{}'><script type='application/json'>{}</script></div>"
    return Markup(pattern).format(label, data)


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
