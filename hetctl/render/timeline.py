"""Who does what when in one step, as rows of spans on one time scale; page.js zooms it by its viewBox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import show_seconds
from hetctl.render.page import each, key, paragraph
from hetctl.render.plan import named_ranks
from hetctl.trainer.planning.predicted_step import PredictedStep

MOST_SPANS = 8000  # drawn; a longer step shows its beginning
DENSE = 600  # spans
ROW, BAR = 26, 18  # pixels
WIDTH = 100_000  # units of the picture, for the whole time: browsers draw nothing beyond 33 million
# kind of a span -> its meaning and colour; simulated and measured spans share them
KINDS = {
    "R": ("forward of the reference", "#8fa8dd"),
    "F": ("forward", "#4c78c9"),
    "B": ("backward", "#2a9d78"),
    "W": ("weight gradients", "#8fbf6f"),
    "send": ("transfer", "#c9a227"),
    "wait-R": ("waiting for a stage", "#d9c26a"),
    "wait-F": ("waiting for a stage", "#d9c26a"),
    "wait-B": ("waiting for a stage", "#d9c26a"),
    "sync": ("gradient sum", "#b0537d"),
    "weights": ("waiting for weights", "#e08a3c"),
    "world": ("the step's figures", "#a9b1ba"),
    "update": ("update", "#7d6bb3"),
}


def meaning_of(kind: str) -> tuple[str, str]:
    """A span's meaning and colour; of a kind that is of another version, its own name in grey."""
    return KINDS.get(kind, (kind, "#a9b1ba"))


@dataclass(frozen=True)
class Bar:
    """One span of a row, seconds from the step's begin."""

    kind: str
    start_s: float
    end_s: float
    micro_batch: int | None = None

    @property
    def tip(self) -> str:
        what = meaning_of(self.kind)[0] + ("" if self.micro_batch is None else f" of micro-batch {self.micro_batch}")
        return f"{what}: {show_seconds(self.end_s - self.start_s)} from {show_seconds(self.start_s)}"


@dataclass(frozen=True)
class Row:
    """What one stage, or one rank, does."""

    label: str
    bars: tuple[Bar, ...]


def simulated_rows(plan: Plan, step: PredictedStep) -> list[Row]:
    """A row per stage of each simulated replica."""
    of: dict[tuple[int, int], list[Bar]] = {}
    for s in step.spans:
        of.setdefault((s.replica, s.stage), []).append(Bar(s.kind, s.start_s, s.end_s, s.micro_batch))
    rows = []
    for number in range(len(plan.replicas) // step.clones):
        for index, stage in enumerate(step.of_replica(plan, number).stages):
            label = f"{plan.ranks[stage.ranks[0]].island}, stage {index}, {named_ranks(stage.ranks)}"
            rows.append(Row(label, tuple(of.get((number, index), ()))))
    return rows


def measured_rows(plan: Plan, ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """A row per rank, as its run recorded the last step."""
    begin = min((s["start"] for own in ranks for s in own), default=0.0)
    rows = []
    for rank, own in zip(plan.ranks, ranks, strict=False):  # a plan may have been put there since
        bars = (Bar(s["kind"], s["start"] - begin, s["end"] - begin, _micro_batch(s)) for s in own)
        rows.append(Row(f"{rank.device_class}, rank {rank.rank}", tuple(bars)))
    return rows if any(row.bars for row in rows) else []


def timeline(parts: Sequence[tuple[str, Sequence[Row]]]) -> Markup:
    """The rows of each part under its name; empty where nothing is known of any."""
    known = [(name, rows) for name, rows in parts if any(row.bars for row in rows)]
    every = sorted((b.start_s, b.end_s) for _, rows in known for row in rows for b in row.bars)
    shown = every[:MOST_SPANS]
    until = max((end for _, end in shown), default=0.0)
    if until <= 0:
        return Markup()
    names, drawn, y = Markup(), [], 0
    for name, rows in known:
        names += Markup("<div class='part'>{}</div>").format(name)
        y += ROW
        for row in rows:
            names += Markup("<div title='{0}'>{0}</div>").format(row.label)
            drawn += [_rect(bar, y, WIDTH / until) for bar in row.bars if bar.start_s <= shown[-1][0]]
            y += ROW
    label = f"one step of {show_seconds(until)}: " + ", ".join(name for name, _ in known)
    svg = Markup(
        "<svg viewBox='0 0 {width} {y}' data-seconds='{until}' height='{y}' preserveAspectRatio='none' role='img' "
        "aria-label='{label}'>{drawn}</svg>"
    ).format(width=WIDTH, y=y, until=until, label=label, drawn=Markup().join(drawn))
    ticks = each("<span>{}</span>", ((show_seconds(until * i / 4),) for i in range(5)))
    used = {b.kind for _, rows in known for row in rows for b in row.bars}
    colours = dict(map(meaning_of, sorted(used, key=[*KINDS, *used].index)))
    dense = "" if len(shown) < DENSE else " dense"  # lines between bars would be all that is seen
    cut = paragraph("" if len(shown) == len(every) else f"The first {show_seconds(until)}.")
    return Markup(
        "{}{}<div class='timeline{}'><div class='names'>{}</div><div class='spans'>{}</div>"
        "<div class='ticks'>{}</div></div>"
    ).format(key(colours), cut, dense, names, svg, ticks)


def _rect(bar: Bar, y: int, scale: float) -> Markup:
    thin = bar.kind == "send"  # beside what the stage computes
    top, height = (y + BAR + 2, 5) if thin else (y + 2, BAR)
    x, width = bar.start_s * scale, max((bar.end_s - bar.start_s) * scale, 0.01)
    pattern = "<rect x='{:.2f}' y='{}' width='{:.2f}' height='{}' fill='{}'><title>{}</title></rect>"
    return Markup(pattern).format(x, top, width, height, meaning_of(bar.kind)[1], bar.tip)


def _micro_batch(span: dict[str, Any]) -> int | None:
    return number if (number := span.get("micro_batch", -1)) >= 0 else None
