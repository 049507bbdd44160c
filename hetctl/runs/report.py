"""`hetctl report`: a run's page made from its folder, at any moment, also of a run that is under way or was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json
from hetctl.comm.contract.plan import Plan, load_plan
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.records import SummaryRecord, TimelineRecord, fit
from hetctl.render.report import describe_islands, write_report
from hetctl.render.run import summary_table
from hetctl.runs.manage import find_folder, is_running
from hetctl.runs.resume import shares_cores
from hetctl.runs.summary import NEEDED, RunSummary
from hetctl.trainer.adapt.pace import yardstick
from hetctl.trainer.recipe import load_recipe

WITHOUT = "move the file away: the report is then made of what the run's other files hold"


def report_run(word: str | None, sink: Sink) -> dict[str, Any]:
    """Write a run's report.html from what its folder holds now; the figures it shows. Raises ConfigError."""
    folder = find_folder(word)
    summary, timeline = figures(folder)
    write_report(folder, {**summary, "timeline": timeline})
    sink.say(summary_table(summary))
    sink.say(f"report: {folder.report}")
    return {**summary, "report": str(folder.report)}


def figures(folder: RunFolder) -> tuple[dict[str, Any], list[Any]]:
    """A run's summary as far as its folder tells it now, and its last step's timeline. Raises ConfigError."""
    if not folder.plan.is_file():
        raise ConfigError(f"{folder.path} holds no plan.yaml", hint="a report is made of what `hetctl train` leaves")
    plan = load_plan(folder.plan)
    running = is_running(folder)
    ended = folder.summary.is_file() and not running
    summary = _ended(folder) if ended else _so_far(folder, plan, running=running)
    if not ended or not folder.timeline.is_file():
        return summary, []
    return summary, _read(TimelineRecord, folder.timeline, under="ranks")["ranks"]


def _ended(folder: RunFolder) -> dict[str, Any]:
    """The summary of a run that has ended. Raises ConfigError where it lacks what the page and the table need."""
    summary = _read(SummaryRecord, folder.summary)
    if missing := [key for key in NEEDED if key not in summary]:
        raise ConfigError(f"{folder.summary} is damaged: it lacks '{missing[0]}'", hint=WITHOUT)
    return summary


def _read(kind: type[Any], path: Path, *, under: str = "") -> dict[str, Any]:
    """A file's record; of one that is a list, `under` the name that the record has for it."""
    try:
        data = read_json(path)
        return fit(kind, {under: data} if under else data, where=path.name)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint=WITHOUT) from None


def _so_far(folder: RunFolder, plan: Plan, *, running: bool) -> dict[str, Any]:
    """What the metrics tell of a run without a summary; what only its end could tell is absent."""
    reached, metrics = folder.progress(), folder.read_metrics()
    seconds = sum(m.get("step_time_s", 0.0) for m in metrics)
    rate = reached["tokens"] / seconds if seconds else None
    fits = bool(metrics) and not {"mfu", "efficiency"}.isdisjoint(metrics[-1])  # the plan's yardstick, said the run
    return RunSummary(
        run=folder.name,
        status="running" if running else "ended without a summary",
        model=plan.model,
        parameters=None,
        steps_planned=load_recipe(folder.recipe).train.steps if folder.recipe.is_file() else None,
        **reached,
        islands=describe_islands(plan),
        emulated=None,
        wall_s=None,
        run_dir=str(folder.path),
        shares_cores=shares_cores(folder),
        **yardstick(plan, plan.cluster_digest).verdict(rate if fits else None),
    ).document() | {"tokens_per_s": rate}
