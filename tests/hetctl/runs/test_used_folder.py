"""A run's folder that is used again: what it holds is neither lost nor taken for something else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hetctl.launcher.run_folder.folder import RunFolder
from tests.hetctl.process import hetctl_json
from tests.hetctl.runs.test_train import ROOT, command, processes_of, start, steps_done, wait_for


def train(run: Path, *more: str, steps: int) -> subprocess.CompletedProcess[str]:
    wide = {**{"COLUMNS": "1000"}, "PATH": "/usr/bin:/bin", "HOME": str(run.parent)}
    return subprocess.run(command(run, *more, steps=steps), cwd=ROOT, text=True, capture_output=True, env=wide)


def export(run: Path, to: Path) -> subprocess.CompletedProcess[str]:
    return hetctl_json("export", str(run), "--to", str(to))


def names(run: Path) -> list[str]:
    return sorted(str(p.relative_to(run / "checkpoints")) for p in (run / "checkpoints").rglob("step-*"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that keeps the checkpoints of the fourth and the sixth."""
    run = tmp_path_factory.mktemp("used") / "run"
    done = train(run, "--set", "checkpoint.every=2", steps=6)
    assert done.returncode == 0, done.stderr
    assert names(run) == ["step-00000004", "step-00000006"]
    return run


@pytest.fixture
def used(first: Path, tmp_path: Path) -> Path:
    shutil.copytree(first, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
def test_a_run_from_the_beginning_leaves_the_old_checkpoints_apart(used: Path) -> None:
    done = train(used, "--resume", "never", "--set", "checkpoint.every=2", steps=4)
    assert done.returncode == 0, done.stderr
    assert "superseded-1" in done.stdout + done.stderr
    apart = [f"superseded-1/step-0000000{n}" for n in (4, 6)]
    assert names(used) == ["step-00000002", "step-00000004", *apart]
    exported = export(used, used.parent / "model")
    assert json.loads(exported.stdout)["step"] == 4


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from_and_that_is_kept(used: Path) -> None:
    shard = next((used / "checkpoints" / "step-00000006").glob("shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    done = train(used, steps=8)
    assert done.returncode == 1
    older = used / "checkpoints" / "step-00000004"
    assert "damaged" in done.stderr
    assert f"--resume {older}" in done.stderr
    assert f"--resume {older}" in json.loads((used / "failure.json").read_text())["hint"]
    done = train(used, "--resume", str(older), "--set", "checkpoint.keep=1", steps=5)
    assert done.returncode == 0, done.stderr
    assert names(used) == ["step-00000005", "superseded-1/step-00000006"]
    assert [m["step"] for m in RunFolder(used).read_metrics()] == [1, 2, 3, 4, 5]


def test_another_model_is_refused_before_anything_is_replaced(used: Path) -> None:
    before = {name: (used / name).read_bytes() for name in ("plan.yaml", "recipe.yaml", "summary.json", "report.html")}
    done = train(used, "--model", "llama-1b", "--set", "data.source=python-stdlib", steps=8)
    assert done.returncode == 2
    assert "is of another model than" in done.stderr
    assert before == {name: (used / name).read_bytes() for name in before}
    job = used / "launch" / "job.json"
    document = json.loads(job.read_text())
    document["shape"]["hidden"] *= 2
    job.write_text(json.dumps(document))
    exported = export(used, used.parent / "model")
    assert exported.returncode == 2
    assert "is of another model than" in exported.stderr


def test_a_setting_that_is_refused_late_leaves_the_run_as_it_was_and_none_on_file(used: Path) -> None:
    names = ("plan.yaml", "recipe.yaml", "metrics.jsonl", "summary.json", "report.html")
    before = {name: (used / name).read_bytes() for name in names}
    done = train(used, "--resume", "never", "--set", "checkpoint.store=gather:nobody", steps=3)
    assert done.returncode == 2, done.stderr
    assert "nobody" in done.stderr
    assert before == {name: (used / name).read_bytes() for name in before}
    assert not list((used.parent / ".local").rglob("active/*.json"))


@pytest.mark.slow
def test_other_samples_are_announced_and_a_finished_run_saves_nothing_twice(used: Path) -> None:
    newest = used / "checkpoints" / "step-00000006"
    inode = newest.stat().st_ino
    done = train(used, "--set", "data.seed=5", steps=6)
    assert done.returncode == 0, done.stderr
    assert "data.seed was 0 before the checkpoint and is 5 now" in done.stdout + done.stderr
    assert newest.stat().st_ino == inode


@pytest.mark.slow
def test_a_restart_before_the_first_checkpoint_goes_on_from_where_the_run_was_told_to(used: Path) -> None:
    run, older = used.parent / "other", used / "checkpoints" / "step-00000004"
    words = ("--resume", str(older), "--max-restarts", "1", "--set", "checkpoint.every=0")
    process = start(run, *words, steps=200)
    wait_for(lambda: steps_done(run) >= 2)
    victim = next(p for p in processes_of(run) if b"RANK=1\0" in (Path("/proc") / str(p) / "environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["restarts"], summary["steps"]) == (1, 200)
    assert [m["step"] for m in RunFolder(run).read_metrics()] == list(range(5, 201))


@pytest.mark.slow
def test_what_an_older_recipe_says_is_compared_not_judged(used: Path) -> None:
    recipe = used / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("profile_step: null", "profile_step: 50"))
    assert "profile_step: 50" in recipe.read_text()
    done = train(used, steps=7)
    assert done.returncode == 0, done.stderr
    recipe.write_text(recipe.read_text().replace("tokenizer: bytes", "tokenizer: /some/tokenizer.json"))
    done = train(used, steps=8)
    assert done.returncode == 2
    assert "its weights know other tokens" in done.stderr
    assert "--set data.tokenizer=/some/tokenizer.json goes on" in done.stderr


@pytest.mark.slow
def test_text_that_changed_under_the_same_name_is_said_on_going_on(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"the line {n} of the text\n" for n in range(20_000)))
    data = ("--set", f"data.source={text}")
    assert train(run, *data, steps=2).returncode == 0
    assert "is not what it was" not in train(run, *data, steps=3).stdout
    text.write_text("".join(f"another line, {n}\n" for n in range(30_000)))
    done = train(run, *data, steps=4)
    assert done.returncode == 0, done.stderr
    assert "note: the text is not what it was before the checkpoint" in done.stdout
