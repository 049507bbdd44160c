"""`hetctl logs`: how far a run is, then what its ranks print; also as both go on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.logs import Follower, clean
from hetctl.render.run import failure_sentence, step_line
from hetctl.runs.manage import find_folder, is_running
from hetctl.runs.resume import shares_cores
from hetctl.runs.verdict import saved_lines
from hetctl.trainer.recipe import load_recipe

TAIL_LINES = 200
TAIL_BYTES = 256 << 10  # of each rank's log, where lines are long
TAIL_STEPS = 5
FOLLOW_S = 0.2
PROGRESS_S = 5.0  # between two looks at the metrics of a run that is followed


class Progress:
    """The run's own lines: its latest steps, and how it ended."""

    def __init__(self, folder: RunFolder, sink: Sink) -> None:
        self.folder, self.sink, self._step, self._looked = folder, sink, 0, 0.0
        self._planned: int | None = None
        self._paces = not shares_cores(folder)
        self.steps: list[dict[str, Any]] = []  # that were shown

    def begin(self) -> None:
        """Where it stands now."""
        self._planned = _steps_planned(self.folder)
        state = "running" if is_running(self.folder) else self.folder.read_summary().get("status", "not running")
        self.sink.say(f"run {self.folder.name}: {state}")
        self._show(TAIL_STEPS)

    def follow(self) -> None:
        """The newest step, now and then."""
        if time.monotonic() - self._looked >= PROGRESS_S:
            self._show(1)

    def end(self) -> None:
        """The last step, and what came of the run; nothing while it goes on."""
        self._show(1)
        if is_running(self.folder):
            return
        if failure := self.folder.read_failure():
            self.sink.say(failure_sentence(failure))
        for line in saved_lines(self.folder.read_summary()):
            self.sink.say(line)

    def _show(self, count: int) -> None:
        self._looked = time.monotonic()
        for record in [m for m in self.folder.read_metrics() if m["step"] > self._step][-count:]:
            self._step = record["step"]
            self.steps.append(record)
            self.sink.say(step_line(record, self._planned, paces=self._paces))


def show_logs(word: str | None, *, follow: bool, ranks: list[int] | None, sink: Sink) -> dict[str, Any]:
    """A run's progress, then the end of its ranks' logs (of some `ranks`: only these), and with `follow` what comes
    from now on, until it ends (or Ctrl-C).

    The document holds what was shown, where a script asked for it.
    """
    folder = find_folder(word)
    progress = Progress(folder, sink)
    lines: list[dict[str, Any]] = []

    def show(rank: int, line: str) -> None:
        if sink.as_json:
            lines.append({"rank": rank, "line": line})
        else:
            sink.people.print(f"[{rank}] {line}", highlight=False, markup=False, soft_wrap=True)

    with contextlib.suppress(KeyboardInterrupt):  # the way to leave `-f`; the run goes on
        _show(folder, ranks, progress, show, follow=follow)
    return {"run": folder.name, "progress": progress.steps, "lines": lines}


def _show(
    folder: RunFolder, ranks: list[int] | None, told: Progress, show: Callable[[int, str], None], *, follow: bool
) -> None:
    while not (logs := _logs(folder, ranks)) and follow and is_running(folder):
        time.sleep(FOLLOW_S)  # it has only begun
    if not logs:
        raise ConfigError(f"{folder.path} holds no logs" + (f" of ranks {ranks}" if ranks else ""))
    trains = folder.recipe.is_file() or folder.metrics.is_file()  # programs have no steps
    progress = told if trains and not ranks else None
    if progress:
        progress.begin()
    ends = {rank: _show_end(rank, path, show) for rank, path in logs.items()}
    with Follower(logs if follow else {}, show, begin=ends):
        while follow and is_running(folder):
            time.sleep(FOLLOW_S)
            if progress:
                progress.follow()
    if progress:
        progress.end()


def _steps_planned(folder: RunFolder) -> int | None:
    """What the run's recipe asks for; None for a program, and for a recipe by other rules."""
    try:
        return load_recipe(folder.recipe).train.steps
    except ConfigError:
        return None


def _logs(folder: RunFolder, ranks: list[int] | None) -> dict[int, Path]:
    return {r: p for r, p in sorted(folder.logs.items()) if not ranks or r in ranks}


def _show_end(rank: int, path: Path, show: Callable[[int, str], None]) -> int:
    """Show a log's last lines; returns how far it was read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(size - file.tell())
    whole, newline, _ = data.rpartition(b"\n")
    for line in whole.decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]:
        show(rank, clean(line))
    return size - len(data) + len(whole) + len(newline)
