"""`report.html` of a run: how it went, what failed, and how its steps compare with what the plan expected of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from markupsafe import Markup

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json, write_atomically
from hetctl.comm.contract.plan import Plan, load_plan
from hetctl.comm.contract.units import listed, show_bytes, show_seconds, span_of
from hetctl.comm.contract.values import decode
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.waiting import Waiting, read_flights, root_of, who_waited
from hetctl.render.bars import memory_bars
from hetctl.render.cluster_picture import cluster_picture
from hetctl.render.page import Line, Tone, bullets, chart, command, numbers, page, paragraph, table
from hetctl.render.plan import named_ranks, show_ranks
from hetctl.render.plan_page import memory_rows, stages_table
from hetctl.render.run import of_paces, parity_sentence, show_efficiency, stalled_sentence
from hetctl.render.timeline import measured_rows, simulated_rows, timeline
from hetctl.render.verdict import run_limit, run_verdict, run_waterfall
from hetctl.trainer.planning.predicted_step import PredictedStep

SHARES = ("compute", "bubble", "bridge", "native", "update")  # of a step, as the summary names them
MOST_WAITING = 32  # ranks
MOST_POINTS = 4000  # of a chart
SMOOTHING, SMOOTHED_FROM = 0.9, 20  # an exponential mean's weight of what was; fewer steps are shown as they are


def write_report(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write the run's report.html atomically. Raises OSError and ConfigError."""
    quotes = folder.failure.is_file()  # what a rank printed
    write_atomically(folder.report, report_page(folder, summary), private=quotes)


def report_page(folder: RunFolder, summary: dict[str, Any], *, follow_s: float | None = None) -> str:
    """The page's HTML, from the run's plan, metrics, summary and failure. Raises OSError and ConfigError."""
    plan, metrics = load_plan(folder.plan), folder.read_metrics()
    limit, failure, expected = run_limit(plan, summary), folder.read_failure(), _predicted(folder, plan)
    rows = {"measured": measured_rows(plan, summary.get("timeline") or [])}
    if not summary.get("shares_cores"):
        rows = {"predicted": simulated_rows(plan, expected), **rows}
    summary = of_paces(summary)
    memory = memory_rows(plan, expected.memory, summary.get("memory_bytes") or ())
    sections = [
        ("What failed", failure_card(failure, _waiting(folder, failure)) if failure else Markup()),
        ("Go on from here", _go_on(summary)),
        ("Figures", _figures(summary)),
        ("Loss", _loss(metrics, summary)),
        ("Tokens per second", _rates(metrics)),
        ("Cluster", cluster_picture(plan, limit.islands, limit.why)),
        ("Where a step's time went", run_waterfall(plan, summary)),
        ("One step", timeline(list(rows.items()))),
        ("Memory of each device", memory_bars(memory)),
        ("Islands", _islands(plan, summary)),
        ("Hosts", _hosts(plan, summary, folder.read_versions())),
        ("Stages", stages_table(plan)),
        ("Why so", bullets(plan.reasons)),
    ]
    tone: Tone = "bad" if summary["status"] == "failed" else "good" if summary["status"] == "done" else "plain"
    lead = "Emulated: labels decide who may talk natively." if summary["emulated"] else ""
    title = f"hetctl run {folder.name}"
    return page(title, run_verdict(plan, summary), sections, tone=tone, lead=lead, follow_s=follow_s)


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


def failure_card(failure: Mapping[str, Any], waiting: Sequence[Waiting]) -> Markup:
    """Who failed first, why, what it said, and who waited for whom."""
    first = Markup("<p class='bad'><strong>Rank {} on {} failed first:</strong> {}</p>")
    card = first.format(failure.get("rank"), failure.get("host"), failure.get("reason"))
    card += paragraph(f"Hint: {hint}" if (hint := failure.get("hint")) else "")
    if said := str(failure.get("traceback") or ""):
        card += Markup("<h3>What it said</h3><pre tabindex='0'>{}</pre>").format(said.strip())
    if waits := table(("rank", "waited for", "in", "group"), [_wait(one) for one in waiting[:MOST_WAITING]]):
        behind, more = root_of(waiting), len(waiting) - MOST_WAITING
        said = "" if behind is None else f"Rank {behind} did not come to what the others had begun."
        said += f" {more} more waited: hetctl doctor --run." if more > 0 else ""
        card += Markup("<h3>Who waited for whom</h3>{}{}").format(paragraph(said.strip()), waits)
    if victims := failure.get("victims"):
        card += paragraph(f"Ended because of it: {named_ranks(victims)}.")
    logs = f"less {shlex.quote(str(failure['log']))}" if failure.get("log") else ""
    return card + (command(logs) if logs else Markup())


def _waiting(folder: RunFolder, failure: Mapping[str, Any]) -> tuple[Waiting, ...]:
    """From the ranks' flight recorders, or where those stayed on their hosts from what the agents told of them."""
    told = {int(rank): of for rank, of in (failure.get("waiting") or {}).items() if rank.isdecimal() and len(rank) < 9}
    return who_waited(read_flights(folder, []) or told)


def _wait(one: Waiting) -> tuple[object, ...]:
    return one.rank, named_ranks(one.targets) if one.targets else "its group", one.operation, one.group


def _go_on(summary: Mapping[str, Any]) -> Markup:
    """The command that continues the run, where its summary has one, and from which step."""
    if not (words := summary.get("resume")):
        return Markup()
    step = summary.get("checkpoint_step")
    return paragraph("" if step is None else f"The newest checkpoint is of step {step}.") + command(words)


def _figures(summary: Mapping[str, Any]) -> Markup:
    def show(value: Any, form: str) -> str | None:
        return None if value is None else format(value, form)

    efficiency = None if summary.get("efficiency") is None else show_efficiency(dict(summary))
    parameters = show(summary["parameters"], ",")
    figures = numbers(
        (
            ("model", summary["model"]),
            ("parameters", parameters),
            ("steps", f"{summary['steps']}" + (f" of {summary['steps_planned']}" if summary["steps_planned"] else "")),
            ("first loss", show(summary["first_loss"], ".4f")),
            ("last loss", show(summary["last_loss"], ".4f")),
            ("validation loss", show(summary.get("validation_loss"), ".4f")),
            ("best step", show(summary.get("best_step"), "")),
            ("its validation loss", show(summary.get("best_validation_loss"), ".4f")),
            ("validation accuracy", show(summary.get("validation_accuracy"), ".1%")),
            ("tokens/s", show(summary.get("tokens_per_s"), ",.0f")),
            ("MFU", show(summary.get("mfu"), ".1%")),
            ("over the bridge", _size(summary.get("bridge_bytes"))),
            ("waiting for others", show(summary.get("bubble_share"), ".1%")),
            ("lost to the bridge", show(summary.get("bridge_share"), ".1%")),
            ("wall time", None if summary["wall_s"] is None else show_seconds(summary["wall_s"])),
        )
    )
    more = [f"Efficiency: {efficiency}."] if efficiency else []
    more += [f"Ended early: {stalled_sentence(summary)}."] if summary.get("stalled") else []
    more += [f"{parity_sentence(parity).capitalize()}."] if (parity := summary.get("parity")) else []
    return figures + Markup().join(map(paragraph, more))


def _size(count: float | None) -> str | None:
    return None if count is None else show_bytes(count)


def _loss(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Markup:
    """Each step's loss, its smoothed course, and the validation's."""
    validated = {v["step"]: v["validation_loss"] for v in summary.get("validations") or ()}
    validated |= {summary["steps"]: v} if (v := summary.get("validation_loss")) is not None else {}
    kept = _thinned(metrics, also=validated)
    steps = [m["step"] for m in kept]
    losses = dict(zip((m["step"] for m in metrics), smoothed([m.get("loss") for m in metrics]), strict=True))
    lines = [Line("loss", [m.get("loss") for m in kept], faint=len(metrics) >= SMOOTHED_FROM)]
    if len(metrics) >= SMOOTHED_FROM:
        lines.append(Line("smoothed", [losses[s] for s in steps]))
    lines.append(Line("validation", [validated.get(s) for s in steps], "--bad", points=True))
    return chart("loss over steps", steps, lines)


def _rates(metrics: Sequence[Mapping[str, Any]]) -> Markup:
    kept = _thinned(metrics)
    rates = Line("tokens per second", [m.get("tokens_per_s") for m in kept], "--good")
    return chart("tokens per second over steps", [m["step"] for m in kept], [rates], unit="tokens/s")


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The exponential mean of what is known so far, without the pull of its beginning (Kingma and Ba, section 3)."""
    found: list[float | None] = []
    mean = weight = 0.0
    for value in values:
        if value is not None:
            mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + 1 - SMOOTHING
        found.append(None if value is None else mean / weight)
    return found


def _thinned(metrics: Sequence[Mapping[str, Any]], also: Mapping[int, Any] | None = None) -> list[Mapping[str, Any]]:
    every = math.ceil(len(metrics) / MOST_POINTS) or 1
    return [m for i, m in enumerate(metrics) if i % every == 0 or m["step"] in (also or ())]


def _predicted(folder: RunFolder, plan: Plan) -> PredictedStep:
    """What was expected of the plan that the run began with; nothing where it was not predicted, or has changed."""
    with suppress(OSError, ValueError, ConfigError):
        kept = decode(PredictedStep, read_json(folder.predicted), where="predicted.json")
        stages = {(s.replica, s.stage) for s in kept.spans}
        mine = {
            (n, k)
            for n in range(len(plan.replicas) // kept.clones)
            for k in range(len(kept.of_replica(plan, n).stages))
        }
        if len(kept.memory) == plan.world_size and stages <= mine:
            return kept
    return PredictedStep((), 1, ())


def _islands(plan: Plan, summary: Mapping[str, Any]) -> Markup:
    """Where each island's time went; columns that nobody knows anything of are left out."""
    known = [n for n in SHARES if any((i.get("shares") or {}).get(n) is not None for i in summary["islands"])]
    held = any(i.get("memory_bytes") for i in summary["islands"])
    head = ("island", "vendor", "ranks", "layers", *known, *(("memory",) if held else ()))
    rows = []
    for island in summary["islands"]:
        layers = ", ".join(span_of(a, b - 1) for a, b in island["layers"]) or "idle"
        own = island.get("shares") or {}
        shares = ("" if own.get(name) is None else f"{own[name]:.1%}" for name in known)
        cells = (island["name"], island["vendor"], show_ranks(island["ranks"]), layers, *shares)
        rows.append((*cells, show_bytes(island.get("memory_bytes")))[: len(head)])
    ways = [f"{' and '.join(b.islands)}: {b.transport} ({b.reason})" for b in plan.bridges]
    return table(head, rows) + bullets(ways)


def _hosts(plan: Plan, summary: Mapping[str, Any], versions: Mapping[str, Mapping[str, str]]) -> Markup:
    """What runs where, with which versions, who is slow, and with which hetctl."""
    known = list(dict.fromkeys(name for found in versions.values() for name in found))
    ranks: dict[str, list[int]] = {}
    for rank in plan.ranks:
        ranks.setdefault(rank.host, []).append(rank.rank)
    slow = {s["rank"]: s["ratio"] for s in summary.get("stragglers") or ()}
    rows = []
    for host, own in ranks.items():
        classes = listed(sorted({plan.ranks[r].device_class for r in own}))
        behind = ", ".join(f"rank {r}: {slow[r]:.2f} times as long as its like" for r in own if r in slow)
        found = [versions.get(host, {}).get(name, "") for name in known]
        rows.append((host, show_ranks(own), classes, *found, *((behind,) if slow else ())))
    for name in versions.keys() - ranks.keys():  # an island on a host with another Python
        rows.append((name, "", "", *(versions[name].get(key, "") for key in known), *(("",) if slow else ())))
    made = Markup()
    with suppress(PackageNotFoundError):
        made = paragraph(f"Written by hetctl {version('hetctl')}.")
    return table(("host", "ranks", "devices", *known, *(("stragglers",) if slow else ())), rows) + made
