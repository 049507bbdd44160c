"""Horizontal bars of a page: memory stacked by what it is for, and a step's time from the ideal to the real one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from hetctl.comm.contract.units import show_bytes, show_seconds
from hetctl.render.page import key, paragraph

MEMORY_COLOURS = {"weights": "#4c78c9", "gradients": "#b0537d", "optimiser": "#7d6bb3", "activations": "#2a9d78"}
LOST, GAINED, WHOLE = "#c9772b", "#2a9d78", "#4c78c9"


@dataclass(frozen=True)
class MemoryBar:
    """What equal ranks hold: bytes by their use, of what the device has, beside what was measured; None: unknown."""

    label: str
    parts: tuple[tuple[str, int], ...]
    have_bytes: int | None = None
    measured_bytes: int | None = None

    @property
    def need_bytes(self) -> int:
        return sum(size for _, size in self.parts)


def memory_bars(bars: Sequence[MemoryBar]) -> Markup:
    """A row for each bar, on one scale, the uses as stacked segments."""
    if not bars:
        return Markup()
    most = max(max(b.need_bytes, b.have_bytes or 0, b.measured_bytes or 0) for b in bars) or 1
    used = {name for b in bars for name, size in b.parts if size}
    measured = " The upright mark is what the fullest of the ranks took." if any(b.measured_bytes for b in bars) else ""
    colours = {name: colour for name, colour in MEMORY_COLOURS.items() if name in used}
    rest = {name: WHOLE for name in used if name not in colours}
    about = paragraph(f"Predicted; the frame is what the device has.{measured}")
    return Markup().join([key(colours | rest), about, *(_memory_row(bar, most) for bar in bars)])


def _memory_row(bar: MemoryBar, most: int) -> Markup:
    segments, start = Markup(), 0
    for name, size in bar.parts:
        segments += _bar(start / most, size / most, MEMORY_COLOURS.get(name, WHOLE), f"{name}: {show_bytes(size)}")
        start += size
    if bar.measured_bytes:
        tip = f"measured: {show_bytes(bar.measured_bytes)}"
        pattern = "<span class='mark' style='left:{:.3%}' title='{}'></span>"
        segments += Markup(pattern).format(bar.measured_bytes / most, tip)
    have = f" of {show_bytes(bar.have_bytes)}" if bar.have_bytes else ""
    value = f"{show_bytes(bar.need_bytes)}{have}" if bar.need_bytes else "idle"
    pattern = "<div class='track room' style='width:{:.3%}'></div>" if bar.have_bytes else "<div class='track'></div>"
    frame = Markup(pattern).format((bar.have_bytes or 0) / most)
    return _row(bar.label, Markup("<div class='stack'>{}{}</div>").format(frame, segments), value)


def waterfall(first: tuple[str, float], losses: Iterable[tuple[str, float]], last: str) -> Markup:
    """Seconds of a step: the ideal, what was added for each cause, and what that comes to."""
    name, reached = first
    every = [(name, seconds) for name, seconds in losses if abs(seconds) > 1e-9]
    courses = list(accumulate((seconds for _, seconds in every), initial=reached))
    whole, most = courses[-1], max(courses) or 1.0
    rows = [_row(name, _track(0, reached / most, GAINED, show_seconds(reached)), show_seconds(reached))]
    for cause, seconds in every:
        start, reached = min(reached, reached + seconds), reached + seconds
        said = f"{'+' if seconds > 0 else '−'}{show_seconds(abs(seconds))}, {abs(seconds) / (whole or 1.0):.1%}"
        rows.append(_row(cause, _track(start / most, abs(seconds) / most, LOST if seconds > 0 else GAINED, said), said))
    return Markup().join([*rows, _row(last, _track(0, whole / most, WHOLE, show_seconds(whole)), show_seconds(whole))])


def _track(start: float, width: float, colour: str, tip: str) -> Markup:
    return Markup("<div class='track'>{}</div>").format(_bar(start, width, colour, tip))


def _bar(start: float, width: float, colour: str, tip: str) -> Markup:
    place = f"left:{start:.3%};width:{width:.3%};background:{colour}"
    return Markup("<span class='bar' style='{}' title='{}'></span>").format(place, tip)


def _row(label: str, bar: Markup, value: str) -> Markup:
    return Markup("<div class='row'><span>{}</span>{}<span>{}</span></div>").format(label, bar, value)
