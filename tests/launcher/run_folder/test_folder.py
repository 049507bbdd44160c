"""A run's folder: figures and events outlive whoever was killed while writing them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetctl.launcher.run_folder.folder import PIECE, RunFolder


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 3.0 - step / 10, "tokens": 256}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3', "", "x" * (2 * PIECE)])
def test_a_torn_last_line_is_cut_off_before_the_next(folder: RunFolder, torn: str) -> None:
    folder.metrics.write_text(line(1) + line(2) + torn)
    folder.events.write_text(torn)
    folder.cut_torn_lines()
    folder.append_metrics({"step": 3, "loss": 2.5, "tokens": 256})
    folder.append_event({"event": "done"})
    assert [m["step"] for m in folder.read_metrics()] == [1, 2, 3]
    assert folder.progress() == {"steps": 3, "first_loss": 2.9, "last_loss": 2.5, "tokens": 768}
    assert [json.loads(text)["event"] for text in folder.events.read_text().splitlines()] == ["done"]


def test_a_new_folder_has_nothing_to_cut(folder: RunFolder) -> None:
    folder.cut_torn_lines()
    assert not list(folder.path.iterdir())


@pytest.mark.parametrize("strange", ['{"step": 2, "lo{"step": 2}', "{}", "[]", "7", '{"step": "2"}', "", "[" * 100000])
def test_lines_that_are_of_no_step_are_passed_over(folder: RunFolder, strange: str) -> None:
    folder.metrics.write_text(line(1) + strange + "\n" + line(3))
    assert [m["step"] for m in folder.read_metrics()] == [1, 3]


def test_of_steps_made_anew_the_later_ones_count(folder: RunFolder) -> None:
    folder.metrics.write_text(line(1) + line(2) + line(3) + line(2))
    assert [m["step"] for m in folder.read_metrics()] == [1, 2]
