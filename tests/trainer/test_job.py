"""One job file serves hosts whose run folders lie elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.comm.contract import variables
from hetctl.trainer.job import Job, current_job
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.recipe import Recipe
from tests.layouts import Cut, Layout, Pipe, plan_of


def test_its_paths_are_those_of_the_folder_in_which_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Layout(((0,),), (Pipe((Cut((0, 4), (0,)),), 1, 1),)), seq_len=8)
    text = Job(plan, Recipe(), SHAPES["demo"], "checkpoints", "checkpoints/step-00000002").to_json()
    for host in ("alpha", "beta"):
        file = tmp_path / host / "launch" / "job.json"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        monkeypatch.setenv(variables.JOB, str(file))
        job = current_job()
        assert (job.checkpoints, job.resume) == (
            str(tmp_path / host / "checkpoints"),
            str(tmp_path / host / "checkpoints" / "step-00000002"),
        )
    elsewhere = Job(plan, Recipe(), SHAPES["demo"], "/there", "/kept/step-00000001").to_json()
    Path(file).write_text(elsewhere)
    assert (current_job().checkpoints, current_job().resume) == ("/there", "/kept/step-00000001")
