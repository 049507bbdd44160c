"""`hetctl resume`: what a run was started with, what is changed of it, and the command that every bad end prints."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, Interrupted, Unreachable, WorkFailed
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.prepare import Prepared, prepare
from hetctl.runs.resume import changes, keep, kept, newest_on, refuse_finished, resume_command
from hetctl.runs.verdict import raise_unless_done, with_way_on
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.recipe import changed, load_recipe
from tests.hetctl.process import hetctl
from tests.hetctl.runs.test_train import start, steps_done, wait_for

FAILURE: dict[str, Any] = {
    "rank": 1,
    "host": "red",
    "reason": "ValueError: no",
    "traceback": "Traceback\n  here",
    "victims": [0],
    "log": "/logs/rank-1.log",
}


def prepared(spec: str = "cpu:1,cpu:1") -> Prepared:
    cluster = describe_cluster(parse_spec(spec, CLASSES), CLASSES)
    return prepare(load_recipe(None), cluster, speeds={"cpu": 0.04}, way="local", sink=Sink())


def written(run: Path) -> dict[Path, int]:
    """The files of a run, and when each was written."""
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}


def command_of(text: str) -> list[str]:
    """The words of the one command to go on with that a text prints, after `hetctl`."""
    [line] = [line for line in text.splitlines() if line.startswith("resume: ")]
    words = shlex.split(line.removeprefix("resume: "))
    assert words.pop(0) == "hetctl"
    return words


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that would take for ever, its errors after one Ctrl-C."""
    run = tmp_path_factory.mktemp("resume") / "my run"
    process = start(run, steps=100_000)
    wait_for(lambda: steps_done(run) >= 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 130, errors
    return run, errors


def test_figures_that_never_reached_the_launcher_are_those_of_the_checkpoint(
    interrupted: tuple[Path, str], tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(interrupted[0], tmp_path / "mine"))
    whole, step = run.read_metrics(), json.loads(run.summary.read_text())["steps"]
    run.metrics.write_text(run.metrics.read_text().splitlines()[0] + "\n")  # an agent was stopped, and then ended
    said = hetctl("resume", str(run.path), "--set", f"train.steps={step + 2}")
    assert said.returncode == 0, said.stderr
    found = run.read_metrics()
    assert [record["step"] for record in found] == [*range(1, step + 3)]
    assert [record["loss"] for record in found[:step]] == [record["loss"] for record in whole[:step]]


def test_the_command_that_an_interruption_prints_goes_on_with_what_is_changed(interrupted: tuple[Path, str]) -> None:
    run, errors = interrupted
    summary = json.loads((run / "summary.json").read_text())
    words, step = command_of(errors), summary["steps"]
    assert f"newest checkpoint: step {step}\n" in errors
    assert summary["checkpoint_step"] == step
    assert shlex.split(summary["resume"]) == ["hetctl", *words] == ["hetctl", "resume", str(run)]
    said = hetctl(*words, "--set", f"train.steps={step + 2}", cwd=run.parent)
    assert said.returncode == 0, said.stderr
    assert f"changed: train.steps: 100000 -> {step + 2}\n" in said.stdout
    assert said.stdout.count("changed: ") == 1
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "begin"] == [0, step]
    assert step in [e["step"] for e in events if e["event"] == "saved"]
    assert not any("versions" in e for e in events)
    assert f"continuing from step {step}\n" in said.stdout
    ended = json.loads((run / "summary.json").read_text())
    assert (ended["status"], ended["steps"], ended["first_loss"]) == ("done", step + 2, summary["first_loss"])
    assert "resume" not in ended
    again = hetctl(*words)
    assert again.returncode == 2
    assert f"finished: all of its {step + 2} steps are made" in again.stderr
    assert "--set train.steps=N" in again.stderr


def test_a_dry_run_shows_what_would_go_on_and_touches_nothing(interrupted: tuple[Path, str], tmp_path: Path) -> None:
    run = shutil.copytree(interrupted[0], tmp_path / "runs" / "mine")
    (tmp_path / "runs" / "latest").symlink_to("mine")
    before = written(run)
    words = ("--set", "optimizer.lr=0.001", "--set", "train.steps=1000", "--dry-run", "--json")
    said = hetctl("resume", *words, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    assert (document["status"], document["recipe"]["optimizer"]["lr"]) == ("dry run", 0.001)
    assert "changed: optimizer.lr: 0.002 -> 0.001\n" in said.stderr
    assert written(run) == before


def test_a_dry_run_of_train_makes_no_folder(tmp_path: Path) -> None:
    said = hetctl("train", "--emulate", "h200:1,mi325x:1", "--dry-run", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "ranks" in said.stdout
    assert "predicted" not in said.stdout, "of processes that share cores"
    assert said.stdout.splitlines()[-1] == "dry run: no host was entered, nothing was written"
    assert not list(tmp_path.iterdir())


def test_what_was_decided_comes_back_as_it_was_and_only_for_its_owner(tmp_path: Path) -> None:
    folder, one = RunFolder(tmp_path / "run"), prepared()
    keep(one, folder)
    assert kept(folder) == one
    assert folder.prepared.stat().st_mode & 0o077 == 0


def test_changes_name_the_key_and_both_values_and_the_islands() -> None:
    one = prepared()
    recipe = changed(one.recipe, [("train.steps", 320), ("optimizer.lr", 2e-3)])
    other = prepared("cpu:1,cpu:2").cluster
    assert changes(one, recipe, one.cluster) == [f"train.steps: {one.recipe.train.steps} -> 320"]
    assert changes(one, one.recipe, other) == ["cluster: cpu:1, cpu#2:1 -> cpu:1, cpu#2:2"]
    assert not changes(one, one.recipe, one.cluster)


@pytest.mark.parametrize("content", [None, "{", '{"recipe": 1}'])
def test_a_folder_that_does_not_say_what_it_was_started_with_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = RunFolder(tmp_path / "run")
    if content is not None:
        folder.launch.mkdir(parents=True)
        folder.prepared.write_text(content)
    with pytest.raises(ConfigError):
        kept(folder)


def test_only_a_run_whose_steps_are_all_made_is_finished(tmp_path: Path) -> None:
    folder, recipe = RunFolder(tmp_path), changed(load_recipe(None), [("train.steps", 10)])
    refuse_finished(folder, recipe)
    folder.write_summary({"status": "failed", "steps": 10})
    refuse_finished(folder, recipe)
    folder.write_summary({"status": "done", "steps": 9})
    refuse_finished(folder, recipe)
    folder.write_summary({"status": "done", "steps": 10})
    with pytest.raises(ConfigError, match="finished"):
        refuse_finished(folder, recipe)


def test_a_failure_is_one_block_what_where_what_was_saved_and_how_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.failure.write_text(json.dumps(FAILURE))
    command = resume_command(folder)
    summary = {"status": "failed", "run_dir": str(tmp_path), "failure": "ValueError: no", "failure_hint": "say yes"}
    with pytest.raises(WorkFailed) as caught:
        raise_unless_done({**summary, "checkpoint_step": 40, "resume": command})
    assert caught.value.message == "rank 1 on red failed first: ValueError: no"
    assert caught.value.hint == "say yes"
    assert caught.value.details == (
        "  Traceback",
        "    here",
        "ended because of it: ranks 0",
        "its log: /logs/rank-1.log",
        f"more: {folder.failure}",
        "newest checkpoint: step 40",
        f"resume: hetctl resume {tmp_path}",
    )
    folder.failure.unlink()
    with pytest.raises(Interrupted) as stopped:
        raise_unless_done({**summary, "status": "interrupted", "failure": None, "resume": command})
    assert stopped.value.details == ("no checkpoint was saved: it begins anew", f"resume: {command}")


def test_a_program_that_failed_has_no_checkpoint_to_speak_of(tmp_path: Path) -> None:
    RunFolder(tmp_path).failure.write_text(json.dumps(FAILURE))
    with pytest.raises(WorkFailed) as caught:
        raise_unless_done({"status": "failed", "run_dir": str(tmp_path), "failure": "no"})
    assert not [line for line in caught.value.details if "checkpoint" in line or "resume" in line]


def test_a_trained_run_that_is_not_what_one_process_computes_is_a_failure() -> None:
    parity = {"steps": 5, "worst_deviation": 0.31, "allowed": 1e-4, "precision": "fp32", "equal": False}
    with pytest.raises(WorkFailed, match=r"its first 5 losses are not one process's: up to 0.3 apart") as caught:
        raise_unless_done({"status": "done", "parity": parity})
    assert "do not trust" in caught.value.hint
    raise_unless_done({"status": "done", "parity": {**parity, "equal": True}})


def test_a_start_that_failed_says_how_it_is_begun_again_unless_something_typed_is_wrong(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert with_way_on(Unreachable("red is away"), folder).details == ()
    keep(prepared(), folder)
    assert with_way_on(Unreachable("red is away"), folder).details == (f"resume: hetctl resume {folder.path}",)
    assert with_way_on(ConfigError("red is no name"), folder).details == ()


def test_the_block_goes_to_stderr_in_that_order(capsys: pytest.CaptureFixture[str]) -> None:
    error = WorkFailed("it broke", hint="mend it")
    error.details = ("newest checkpoint: step 40", "resume: hetctl resume /a[b]")
    Sink().failure(error)
    said = ["error: it broke", "hint: mend it", "newest checkpoint: step 40", "resume: hetctl resume /a[b]"]
    assert capsys.readouterr().err.splitlines() == said


def test_a_checkpoint_of_another_run_is_named_in_the_command() -> None:
    words = shlex.split(resume_command(RunFolder(Path("/runs/b")), Path("/runs/a/checkpoints/step-00000040")))
    assert words == ["hetctl", "resume", "/runs/b", "--from", "/runs/a/checkpoints/step-00000040"]


def test_a_model_is_known_by_its_whole_path_wherever_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = load_recipe(None)
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 256}))
    monkeypatch.chdir(tmp_path)
    assert changed(demo, [("model.name", "config.json")]).model.name == str(tmp_path / "config.json")
    assert changed(demo, []) == demo
    assert replace(demo.model, name="demo") == load_recipe(None).model


@pytest.mark.parametrize(
    ("hosts", "newest"),
    [
        ([["step-1", "step-2"], ["step-1"]], "step-1"),
        ([["step-2"], []], "step-2"),  # the other one is new: it gets its part from copies
        ([[], []], None),
        ([["step-00000000"], ["step-00000000"]], None),
        ([["step-2"], ["step-00000000"]], None),  # it was there, and was killed before it named its part
    ],
)
def test_the_newest_checkpoint_is_one_that_every_host_named(hosts: list[list[str]], newest: str | None) -> None:
    assert newest_on(hosts) == newest


@pytest.mark.parametrize("hosts", [[["step-2"], ["step-1"]], [["step-2", "step-3"], ["step-00000000"]]])
def test_checkpoints_that_are_on_some_hosts_only_are_not_made_anew_unasked(hosts: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="none is on all of them"):
        newest_on(hosts)
