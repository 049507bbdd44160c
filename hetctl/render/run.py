"""A run for people: the line that moves while it trains, and the table at its end."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hetctl.comm.units import show_bytes, show_seconds
from hetctl.console import Sink

PLAIN_EVERY_S = 5.0


class LiveRun:
    """Progress of a run: a moving line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, sink: Sink, steps: int) -> None:
        self.sink, self.steps = sink, steps
        self._began: tuple[float, int] | None = None
        self._last_plain = 0.0
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> LiveRun:
        if self.sink.live:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self.sink.people, transient=True)
            self._progress.start()
            self._task = self._progress.add_task("starting the ranks", total=self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, step: int) -> None:
        """The ranks are up and begin at `step`."""
        self._began = (time.monotonic(), step)

    def step(self, record: dict[str, Any]) -> None:
        """One step's figures."""
        left = self._time_left(record["step"])
        words = f"loss {_number(record['loss'])}  {record['tokens_per_s']:,.0f} tokens/s  {left} left"
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], description=words)
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S or record["step"] == self.steps:
            self._last_plain = time.monotonic()
            self.sink.say(f"step {record['step']}/{self.steps}  {words}")

    def note(self, words: str) -> None:
        """Say what is going on besides steps."""
        self.sink.people.print(words, markup=False, highlight=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Say something that stays, above the moving line."""
        console = self.sink.people if self._progress is None else self._progress.console
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def _time_left(self, step: int) -> str:
        if self._began is None or step <= self._began[1]:
            return "?"
        seconds = (time.monotonic() - self._began[0]) / (step - self._began[1]) * (self.steps - step)
        return show_seconds(seconds)


def summary_table(summary: dict[str, Any]) -> Table:
    """What a run came to; what is unknown says so."""
    table = Table(title=f"run {summary['run']}: {summary['status']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = (
        ("steps", f"{summary['steps']} of {summary['steps_planned'] or 'unknown'}"),
        ("loss", f"{_number(summary.get('first_loss'))} -> {_number(summary.get('last_loss'))}"),
        ("validation loss", _number(summary.get("validation_loss"))),
        ("tokens", f"{summary.get('tokens') or 0:,} ({summary.get('tokens_per_s') or 0:,.0f} tokens/s)"),
        ("over the bridge", show_bytes(summary.get("bridge_bytes"))),
        ("lost to the bubble", _share(summary.get("bubble_share"))),
        ("lost to the bridge", _share(summary.get("bridge_share"))),
        *((("replicas end", _apart(apart)),) if (apart := summary.get("replica_spread")) is not None else ()),
        *(("slow rank", _straggler(s)) for s in summary.get("stragglers") or ()),
        *(("counts", f"{a['before']} -> {a['after']} after step {a['step']}") for a in summary.get("adapted") or ()),
        ("wall time", "unknown" if summary["wall_s"] is None else show_seconds(summary["wall_s"])),
        ("run folder", summary["run_dir"]),
    )
    for row in rows:
        table.add_row(*row)
    return table


def failure_lines(failure: dict[str, Any]) -> list[str]:
    """The one block on a failure: who failed first and why, and who only suffered from it."""
    lines = [f"rank {failure['rank']} on {failure['host']} failed first: {failure['reason']}"]
    lines += ["  " + line for line in (failure.get("traceback") or "").splitlines()[-12:]]
    if failure.get("hint"):
        lines.append(f"hint: {failure['hint']}")
    if failure["victims"]:
        ranks = ", ".join(map(str, failure["victims"][:16]))
        lines.append(f"ended because of it: ranks {ranks}{' ...' if len(failure['victims']) > 16 else ''}")
    lines.append(f"its log: {failure['log']}")
    return lines


def _apart(share: float) -> str:
    return f"{share:.1%} of a step apart, when their gradients meet"


def _straggler(found: dict[str, Any]) -> str:
    return f"{found['rank']} on {found['host']}: {found['ratio']:.2f} times as long as ranks that do the same"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%} of the ranks' time"
