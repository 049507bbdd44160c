"""What a follower of a run's events writes down, also where they come twice."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from hetctl.comm.contract.events import Remembered, Step, Told
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.run import LiveRun
from hetctl.runs.follow import Follower
from hetctl.trainer.adapt.pace import Yardstick


def follower(folder: Path) -> Follower:
    return Follower(RunFolder(folder), LiveRun(Sink(as_json=True), 9), {}, Yardstick(None, None))


def step(number: int, *, late: bool = False, kind: type[Step] = Step) -> Told:
    return Told(kind(number, 1.0, 8, 1.0, 0.1, 0.5, 16.0), "here", 0, late=late)


def test_steps_that_come_late_are_written_once(tmp_path: Path) -> None:
    one = follower(tmp_path)
    told = [step(1), step(2), step(2, late=True), step(3, late=True), step(3, late=True), step(4), step(3, late=True)]
    for event in (*told, step(4, kind=Remembered), step(5, kind=Remembered), step(6)):
        one.take(event)
    assert [record["step"] for record in one.folder.read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_a_run_of_many_steps_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = follower(tmp_path)
    monkeypatch.setattr(RunFolder, "append_metrics", lambda folder, record: None)
    for number in range(1, 4001):  # what waits for a board is bounded, too
        one.take(step(number))
    tracemalloc.start()
    for number in range(4001, 8001):
        one.take(step(number))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 4000 * 20
