"""Pictures of docs/concepts.md: what `hetctl plan --html` draws of the plans that the page names, as SVG files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from hetctl.comm.contract.units import listed, show_seconds
from hetctl.console import Sink
from hetctl.discovery.which_cluster import Where, described_cluster
from hetctl.render.cluster_picture import cluster_picture
from hetctl.render.timeline import KINDS, ROW, Row, simulated_rows, timeline
from hetctl.render.verdict import plan_limit
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.recipe import load_recipe

NAMES, BARS, EDGE = 230, 680, 16  # pixels: the names of the rows, what they do, around all
SVG = re.compile(r"<svg[^>]*viewBox='([^']*)'[^>]*>(.*?)</svg>", re.DOTALL)

# the SPEC and the keys that the page says beside each picture
SIZES = (("model.name", "llama-1b"), ("model.seq_len", 4096), ("batch.global_batch", 12))
PIPELINE = (("parallelism.pipeline", 2), ("batch.micro_batch_size", 2))
REPLICAS = (("batch.global_batch", 48), ("parallelism.pipeline", 1), ("batch.micro_batch_size", 4))


def made() -> dict[str, str]:
    """Name of the file -> its SVG."""
    slow = "h200:2,mi325x:2;25GbE"
    return {
        "concepts-cluster.svg": _cluster(_planned("h200:2x4/roce200x4,mi325x:4;100GbE")),
        "concepts-pipeline.svg": _step(_planned(slow, *PIPELINE, ("parallelism.schedule", "1f1b"))),
        "concepts-eager.svg": _step(_planned(slow, *PIPELINE, ("parallelism.schedule", "eager-1f1b"))),
        "concepts-replicas.svg": _step(_planned("h200:2,a100:4;100GbE", *REPLICAS)),
    }


def _planned(spec: str, *keys: tuple[str, object]) -> Planning:
    return weigh(described_cluster(Where(emulate=spec), Sink()), load_recipe(None, (*SIZES, *keys)))


def _cluster(planned: Planning) -> str:
    limit = plan_limit(planned.plan, PredictedStep.of(planned))
    [(view, body)] = drawn_in(cluster_picture(planned.plan, limit.islands, limit.why))
    width, height = view.split()[2:]
    return _picture("A cluster of two islands", f"<g class='cluster'>{body}</g>", float(width), float(height))


def _step(planned: Planning) -> str:
    rows = simulated_rows(planned.plan, PredictedStep.of(planned))
    [(view, body)] = drawn_in(timeline([("", rows)]))
    high = ROW * len(rows)
    bars = (
        f"<svg class='spans' x='{NAMES}' y='{EDGE + ROW}' width='{BARS}' height='{high}' "
        f"viewBox='0 {ROW} {view.split()[2]} {high}' preserveAspectRatio='none'>{body}</svg>"
    )
    names = "".join(_text(EDGE, EDGE + ROW * (k + 1) + 17, row.label) for k, row in enumerate(rows))
    assert planned.plan.predicted is not None
    seconds = show_seconds(planned.plan.predicted.step_time_s)
    whole = _text(EDGE, EDGE + 8, f"one step: {seconds}", "soft")
    title = f"One step, {planned.plan.schedule}, on {listed([i.name for i in planned.plan.islands])}"
    return _picture(title, whole + _key(rows) + names + bars, NAMES + BARS + EDGE, high + 2 * EDGE + ROW)


def _key(rows: Sequence[Row]) -> str:
    """What the colours mean, above the rows."""
    found, x = "", NAMES
    used = {bar.kind for row in rows for bar in row.bars}
    for word, colour in dict(meaning for kind, meaning in KINDS.items() if kind in used).items():
        found += f"<rect x='{x}' y='{EDGE - 3}' width='12' height='12' rx='2' fill='{colour}'/>"
        found += _text(x + 17, EDGE + 8, word, "soft")
        x += 38 + 7 * len(word)
    return found


def drawn_in(html: str) -> list[tuple[str, str]]:
    """The view and the body of each SVG in a page, without the texts that show under the mouse."""
    return [(view, re.sub(r"<title>.*?</title>", "", body)) for view, body in SVG.findall(html)]


def _text(x: float, y: float, words: str, style: str = "name") -> str:
    return f"<text class='{style}' x='{x}' y='{y}'>{escape(words)}</text>"


def _picture(title: str, body: str, width: float, height: float) -> str:
    """A file of its own: the pages' colours, in light and dark, on their ground."""
    css = files("hetctl.render").joinpath("assets/page.css").read_text()
    colours = css[: css.index("@media print")]
    rules = css[css.index("/* the cluster */") : css.index("/* charts */")]
    ground = "<rect width='100%' height='100%' rx='8' style='fill: var(--ground); stroke: var(--line)'/>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' role='img'>"
        f"<title>{escape(title)}</title><style>\n{colours}{rules}"
        "text { fill: var(--ink); font: 13px system-ui, sans-serif; } .soft { fill: var(--soft); }\n"
        f".spans rect {{ stroke: var(--ground); stroke-width: .7px; vector-effect: non-scaling-stroke; }}\n</style>"
        f"{ground}<g class='cluster'>{body}</g></svg>\n"
    )
