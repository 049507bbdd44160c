"""Horizontal bars of a page: memory stacked by what it is for, and a step's time from the ideal to the real one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from hetctl.comm.contract.units import show_bytes, show_seconds
from hetctl.render.page import key

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


def memory_bars(bars: Sequence[MemoryBar]) -> str:
    """A row for each bar, on one scale, the uses as stacked segments."""
    if not bars:
        return ""
    most = max(max(b.need_bytes, b.have_bytes or 0, b.measured_bytes or 0) for b in bars) or 1
    used = {name for b in bars for name, size in b.parts if size}
    measured = " The upright mark is what the fullest of the ranks took." if any(b.measured_bytes for b in bars) else ""
    colours = {name: colour for name, colour in MEMORY_COLOURS.items() if name in used}
    rest = {name: WHOLE for name in used if name not in colours}
    about = f"<p class='lead'>Predicted; the frame is what the device has.{measured}</p>"
    return key(colours | rest) + about + "".join(_memory_row(bar, most) for bar in bars)


def _memory_row(bar: MemoryBar, most: int) -> str:
    segments, start = "", 0
    for name, size in bar.parts:
        segments += _bar(start / most, size / most, MEMORY_COLOURS.get(name, WHOLE), f"{name}: {show_bytes(size)}")
        start += size
    if bar.measured_bytes:
        tip = f"measured: {show_bytes(bar.measured_bytes)}"
        segments += f"<span class='mark' style='left:{bar.measured_bytes / most:.3%}' title='{tip}'></span>"
    have = f" of {show_bytes(bar.have_bytes)}" if bar.have_bytes else ""
    value = f"{show_bytes(bar.need_bytes)}{have}" if bar.need_bytes else "idle"
    room = f" style='width:{bar.have_bytes / most:.3%}'" if bar.have_bytes else ""
    frame = f"<div class='track{' room' if bar.have_bytes else ''}'{room}></div>"
    return _row(bar.label, f"<div class='stack'>{frame}{segments}</div>", value)


def waterfall(first: tuple[str, float], losses: Iterable[tuple[str, float]], last: str) -> str:
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
    return "".join([*rows, _row(last, _track(0, whole / most, WHOLE, show_seconds(whole)), show_seconds(whole))])


def _track(start: float, width: float, colour: str, tip: str) -> str:
    return f"<div class='track'>{_bar(start, width, colour, tip)}</div>"


def _bar(start: float, width: float, colour: str, tip: str) -> str:
    place = f"left:{start:.3%};width:{width:.3%};background:{colour}"
    return f"<span class='bar' style='{place}' title='{escape(tip)}'></span>"


def _row(label: str, bar: str, value: str) -> str:
    return f"<div class='row'><span>{escape(label)}</span>{bar}<span>{escape(value)}</span></div>"
