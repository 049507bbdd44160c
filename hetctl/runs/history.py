"""`hetctl ps -a`: what became of the runs of ./runs and of those on file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract.units import show_seconds
from hetctl.launcher.run_folder.folder import RunFolder, runs_here
from hetctl.launcher.run_folder.registry import LOST, ActiveRun, active


def past_runs() -> list[dict[str, Any]]:
    """Every run, newest first: how far it came, with what loss, how long its last attempt took, and its verdict."""
    known = {run.folder: run for run in active()}
    folders = {str(p.resolve()) for p in runs_here()}
    rows = [_row(RunFolder(Path(folder)), known.get(folder)) for folder in folders | known.keys()]
    return sorted(rows, key=lambda row: -(row["started"] or 0))


def past_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a run; a dash where it has no such figure (a program has no steps)."""
    table = Table("run", "verdict", "step", "loss", "took", "started", "folder")
    for row in rows:
        steps = "-" if row["step"] is None else f"{row['step']}{f' of {n}' if (n := row['steps_planned']) else ''}"
        loss = "-" if row["last_loss"] is None else f"{row['last_loss']:.4f}"
        took = "-" if row["seconds"] is None else show_seconds(row["seconds"])
        began = "-" if row["started"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started"]))
        table.add_row(*map(escape, (row["run"], row["verdict"], steps, loss, took, began, row["folder"])))
    return table


def _row(folder: RunFolder, run: ActiveRun | None) -> dict[str, Any]:
    summary, metrics = folder.read_summary(), folder.read_metrics()
    state = run.state if run else None
    supervised = state is not None and not state.startswith(LOST)
    return {
        "run": folder.name,
        "verdict": state or _verdict(summary),
        "step": metrics[-1]["step"] if metrics else None,
        "steps_planned": summary.get("steps_planned"),
        "first_loss": metrics[0].get("loss") if metrics else None,
        "last_loss": metrics[-1].get("loss") if metrics else None,
        "seconds": time.time() - run.started if run and supervised else summary.get("wall_s"),
        "started": _started(folder),
        "folder": str(folder.path),
        **({"resume": summary["resume"]} if "resume" in summary and not supervised else {}),
    }


def _verdict(summary: dict[str, Any]) -> str:
    if not summary:
        return "ended without a summary"
    why = summary.get("failure")
    status = summary.get("status", "?")
    return f"{status}: {why}" if why else str(status)


def _started(folder: RunFolder) -> float | None:
    """Seconds since the epoch: its identity is made once, when it is first begun."""
    file = folder.launch / "identity"
    return file.stat().st_mtime if file.is_file() else None
