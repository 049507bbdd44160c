"""A run for people: the table that moves while it trains, and the one at its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from hetctl.comm.contract.events import no_better
from hetctl.comm.contract.units import count_of, show_bytes, show_seconds
from hetctl.console import Sink

PLAIN_EVERY_S = 5.0
_OF_PACE = ("mfu", "efficiency", "bubble_share", "bridge_share", "stragglers")
PARTS = ("compute", "bridge_wait", "other_wait", "update")
CAPTION = "bridge wait: for another island's work or for its way here; report.html tells them apart"
BASES = {
    "table": "predicted from the hardware table",
    "measured": "predicted from a profile's measured times",
    "interpolated": "predicted from what a profile measured of other models or lengths",
}


class LiveRun:
    """Progress of a run: a moving table of the islands on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, sink: Sink, steps: int, *, paces: bool = True) -> None:
        self.sink, self.steps = sink, steps
        self.paces = paces  # whether speeds mean something: not of processes that share cores
        self._began: tuple[float, int] | None = None
        self._last_plain = 0.0
        self._islands: dict[str, dict[str, float]] = {}
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=sink.people)
        self._task = self._progress.add_task("starting the ranks", total=steps)
        self.live = Live(self._progress, console=sink.people, transient=True) if sink.live else None

    def __enter__(self) -> LiveRun:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def begin(self, step: int) -> None:
        """The ranks are up and begin at `step`."""
        self._began = (time.monotonic(), step)

    def step(self, record: dict[str, Any]) -> None:
        """One step's figures; those of islands stay until newer ones come."""
        words, left = "  ".join(_figures(record, paces=self.paces)), f"{self._time_left(record['step'])} left"
        if self.live is not None:
            self._progress.update(self._task, completed=record["step"], description=left)
            self._islands = record.get("islands") or self._islands
            known = [islands_table(self._islands)] if self._islands else []
            self.live.update(Group(self._progress, Text(words), *known))
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S or record["step"] == self.steps:
            self._last_plain = time.monotonic()
            self.sink.say(f"{step_line(record, self.steps, paces=self.paces)}  {left}")

    def note(self, words: str) -> None:
        """Say what is going on besides steps; it stays, above what moves."""
        self.sink.people.print(words, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> str:
        if self._began is None or step <= self._began[1]:
            return "?"
        seconds = (time.monotonic() - self._began[0]) / (step - self._began[1]) * (self.steps - step)
        return show_seconds(seconds)


def islands_table(islands: dict[str, dict[str, float]]) -> Table:
    """Where each island's latest step went, and its fullest rank's memory."""
    table = Table("island", "step", *(p.replace("_", " ") for p in PARTS), "memory", caption=CAPTION)
    for island, found in islands.items():
        step = found["step_s"]
        shares = [f"{found[f'{name}_s'] / step:.0%}" if step else "unknown" for name in PARTS]
        table.add_row(escape(island), show_seconds(step), *shares, show_bytes(found["memory_bytes"]))
    return table


def show_efficiency(summary: dict[str, Any]) -> str:
    """The run against the sum of its parts, and where that sum is from."""
    value, basis = summary.get("efficiency"), BASES.get(summary.get("efficiency_basis") or "")
    if value is None or basis is None:
        return "unknown"
    return f"{value:.1%} of what the islands would reach alone ({basis}){above_all(value, faster=basis)}"


def above_all(efficiency: float, *, faster: str = "") -> str:
    """What more than 100 % of the parts' sum means, which looks like a mistake; nothing where it is less."""
    if efficiency <= 1:
        return ""
    than = f", or faster than {faster}" if faster else ""
    return f"; above 100%: alone each has less memory and fewer samples a step{than}"


def of_paces(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without the figures that say nothing of a plan where ranks are processes that take turns on cores."""
    return summary | dict.fromkeys(_OF_PACE) if summary.get("shares_cores") else summary


def summary_table(summary: dict[str, Any]) -> Table:
    """What a run came to. What is unknown has no row, nor has what says nothing of ranks that share cores."""
    summary = of_paces(summary)
    table = Table(title=escape(f"run {summary['run']}: {summary['status']}"), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = (
        ("steps", f"{summary['steps']} of {summary['steps_planned'] or 'unknown'}"),
        *_known("skipped", summary.get("skipped_steps") or None, lambda many: f"{count_of(many, 'step')} not finite"),
        *_known("loss", summary.get("first_loss"), lambda first: f"{first:.4f} -> {show_number(summary['last_loss'])}"),
        *_known("one process", summary.get("parity"), parity_sentence),
        *_known("validation loss", summary.get("validation_loss"), show_number),
        *_known(
            "best step",
            summary.get("best_step"),
            lambda step: f"{step}, validation loss {show_number(summary['best_validation_loss'])}",
        ),
        *_known("ended early", summary.get("stalled"), lambda _: stalled_sentence(summary)),
        *_known("validation accuracy", summary.get("validation_accuracy"), _percent),
        ("tokens", _tokens(summary)),
        *_known("MFU", summary.get("mfu"), _percent),
        *_known("efficiency", summary.get("efficiency"), lambda _: show_efficiency(summary)),
        *_known("over the bridge", summary.get("bridge_bytes"), show_bytes),
        *_known("waiting for others", summary.get("bubble_share"), _share),
        *_known("lost to the bridge", summary.get("bridge_share"), _share),
        *((("replicas end", _apart(apart)),) if (apart := summary.get("replica_spread")) is not None else ()),
        *(("slow rank", _straggler(s)) for s in summary.get("stragglers") or ()),
        *(("counts", f"{a['before']} -> {a['after']} after step {a['step']}") for a in summary.get("adapted") or ()),
        *(("layers", f"{a['before']} -> {a['after']} after step {a['step']}") for a in summary.get("recut") or ()),
        *_known("wall time", summary["wall_s"], show_seconds),
        ("run folder", summary["run_dir"]),
    )
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def next_lines(summary: dict[str, Any]) -> list[str]:
    """Of an emulation that was trained to its end: that it works, by which figures, and what to type next."""
    losses, parity = [summary.get("first_loss"), summary.get("last_loss")], summary.get("parity")
    if summary["status"] != "done" or not summary["emulated"] or None in losses or (parity and not parity["equal"]):
        return []
    islands, crossed = count_of(len(summary["islands"]), "island"), summary.get("bridge_bytes")
    over = f", {show_bytes(crossed)} over the bridge" if crossed else ""
    return [
        f"it works: {islands}, {count_of(summary['steps'], 'step')}, loss {losses[0]:.2f} -> {losses[1]:.2f}{over}",
        *([f"          {parity_sentence(parity)}"] if parity else []),
        f"next: {shlex.join(['hetctl', 'export', summary['run_dir'], '--to', 'my-model'])}",
        "      hetctl discover HOST HOST -o cluster.yaml    # your machines; then hetctl plan, hetctl train",
    ]


def parity_sentence(parity: dict[str, Any]) -> str:
    """How the first losses of a run compare with those of one process."""
    count, worst = count_of(parity["steps"], "loss", "losses"), parity["worst_deviation"]
    precision = parity["precision"]
    if parity["equal"]:
        return f"its first {count} equal one process's within {worst:.1g} ({precision})"
    apart = "not finite" if worst is None else f"up to {worst:.1g} apart"
    return f"its first {count} are not one process's: {apart}, where {precision} explains {parity['allowed']:.1g}"


def stalled_sentence(summary: Mapping[str, Any]) -> str:
    """Why a run ended before its last step."""
    return no_better(summary["stalled"], summary["best_step"])


def failure_sentence(failure: dict[str, Any]) -> str:
    """Who failed first and why."""
    return f"rank {failure['rank']} on {failure['host']} failed first: {failure['reason']}"


def _tokens(summary: dict[str, Any]) -> str:
    """How many, and how fast; a run that only found itself finished has no speed."""
    rate = summary.get("tokens_per_s")
    speed = f"{rate:,.0f} tokens/s" if rate else "no step was left to do" if summary["status"] == "done" else ""
    return f"{summary.get('tokens') or 0:,}" + (f" ({speed})" if speed else "")


def failure_lines(failure: dict[str, Any]) -> list[str]:
    """What is known of a failure beside its sentence: where it happened, and who only suffered from it."""
    lines = ["  " + line for line in (failure.get("traceback") or "").splitlines()[-12:]]
    if failure["victims"]:
        ranks = ", ".join(map(str, failure["victims"][:16]))
        lines.append(f"ended because of it: ranks {ranks}{' ...' if len(failure['victims']) > 16 else ''}")
    lines.append(f"its log: {failure['log']}")
    return lines


def _known(name: str, value: Any, show: Callable[[Any], str]) -> list[tuple[str, str]]:
    """A row of what is known; none of what is not."""
    return [] if value is None else [(name, show(value))]


def _apart(share: float) -> str:
    return f"{share:.1%} of a step apart, when their gradients meet"


def _straggler(found: dict[str, Any]) -> str:
    beside = "predicted, beside the others" if found.get("against") == "prediction" else "ranks that do the same"
    return f"{found['rank']} on {found['host']}: {found['ratio']:.2f} times as long as {beside}"


def step_line(record: dict[str, Any], steps: int | None, *, paces: bool = True) -> str:
    """One step's figures; of a run whose length nobody knows, without that."""
    return "  ".join((f"step {record['step']}{f'/{steps}' if steps else ''}", *_figures(record, paces=paces)))


def show_number(value: float | None) -> str:
    """A loss, for people."""
    return "unknown" if value is None else f"{value:.4f}"


def _figures(record: dict[str, Any], *, paces: bool) -> list[str]:
    """A step's loss and throughput, and what the latter comes to where that is known and says something."""
    words = ("MFU", "efficiency") if paces else ()
    known = [f"{word} {_percent(record[word.lower()])}" for word in words if record.get(word.lower()) is not None]
    if record.get("accuracy") is not None:
        known.insert(0, f"accuracy {_percent(record['accuracy'])}")
    rate = record.get("tokens_per_s")
    fast = [] if rate is None else [f"{rate:,.0f} tokens/s"]
    return [f"loss {show_number(record.get('loss'))}", *fast, *known]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _share(value: float) -> str:
    return f"{value:.1%} of the ranks' time"
