"""Runs after they were started, what is known by name, and what is asked: each through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.errors import ConfigError, Unreachable, WorkFailed
from hetctl.comm.contract.files import write_yaml
from hetctl.console import Sink
from hetctl.launcher.engines.entrance import RELEASES
from hetctl.launcher.run_folder.folder import RunFolder, create_run
from hetctl.launcher.run_folder.registry import active, birth, delist, home
from hetctl.runs import logs
from hetctl.runs.handover import CONSOLE, Handover, run_in_background
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.hardware import CLASSES
from tests.rigs.terminal import on_a_terminal

SUMMARY: dict[str, Any] = {"status": "done", "steps": 3, "steps_planned": 3, "wall_s": 61.0}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def called(*words: str) -> Any:
    """What `hetctl WORDS --json` prints."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def error_of(*words: str) -> ConfigError:
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, ConfigError)
    return error


def a_run(label: str, *, steps: int = 3, at: float = 0.0, **summary: Any) -> RunFolder:
    """A run of ./runs, begun `at` (seconds since the epoch), with metrics and perhaps a summary."""
    folder = create_run(None, label)
    os.utime(folder.launch / "identity" if folder.identity else "", (at, at))
    for step in range(1, steps + 1):
        folder.append_metrics({"step": step, "loss": 5.0 - step, "tokens_per_s": 100.0})
    (folder.path / "logs").mkdir()
    folder.log(0).write_text("rank zero says hello\n")
    if summary:
        folder.write_summary({**SUMMARY, **summary})
    return folder


# a supervisor that is told to end takes its run off the file
SUPERVISOR = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).unlink(), sys.exit()))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that stand for supervisors, of the runs `first` and `second`."""
    names = ("first", "second")
    argv = [[sys.executable, "-S", "-c", SUPERVISOR, str(home() / f"{name}.json")] for name in names]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE) for words in argv]
    for name, process in zip(names, processes, strict=True):
        assert process.stdout is not None
        process.stdout.readline()
        record = {"run": name, "folder": f"/runs/{name}", "pid": process.pid, "born": birth(process.pid)}
        home().mkdir(parents=True, exist_ok=True)
        (home() / f"{name}.json").write_text(json.dumps({**record, "started": float(len(name)), "hosts": {}}))
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_ps_shows_what_became_of_every_run_newest_first() -> None:
    a_run("old", at=1e9, status="done")
    a_run("failing", at=2e9, status="failed", failure="ValueError: no", resume="hetctl resume X")
    a_run("lost", at=1.5e9)
    rows = called("ps", "-a")["runs"]
    assert [row["run"].rpartition("-")[2] for row in rows] == ["failing", "lost", "old"]
    assert [row["verdict"] for row in rows] == ["failed: ValueError: no", "ended without a summary", "done"]
    assert [row["last_loss"] for row in rows] == [2.0, 2.0, 2.0]
    assert [row["seconds"] for row in rows] == [61.0, None, 61.0]
    assert [row.get("resume") for row in rows] == ["hetctl resume X", None, None]
    text = shown("ps", "-a")
    assert "2.0000" in text
    assert "3 of 3" in text
    assert "1m01s" in text
    assert called("ps")["runs"] == [], "without -a only what runs, or was lost"


def test_ps_of_runs_that_go_on_says_so(running: list[subprocess.Popen[bytes]]) -> None:
    assert {row["verdict"] for row in called("ps", "-a")["runs"]} == {"running"}
    running[0].kill()
    running[0].wait()
    verdicts = {row["run"]: row["verdict"] for row in called("ps", "-a")["runs"]}
    assert verdicts["second"] == "running"
    assert "lost" in verdicts["first"]


def test_logs_show_the_runs_progress_before_what_ranks_print() -> None:
    folder = a_run("one", steps=9, status="failed", failure="no", resume="hetctl resume X", checkpoint_step=4)
    failure = {"rank": 1, "host": "red", "reason": "no", "victims": [], "log": "there"}
    folder.failure.write_text(json.dumps(failure))
    lines = shown("logs").splitlines()
    assert lines[0] == f"run {folder.name}: failed"
    assert lines[1:6] == [f"step {n}  loss {5.0 - n:.4f}  100 tokens/s" for n in range(5, 10)]
    assert lines[6] == "[0] rank zero says hello"
    assert lines[7:] == ["rank 1 on red failed first: no", "newest checkpoint: step 4", "resume: hetctl resume X"]
    document = called("logs", folder.name)
    assert [one["step"] for one in document["progress"]] == [5, 6, 7, 8, 9]
    assert document["lines"] == [{"rank": 0, "line": "rank zero says hello"}]
    assert shown("logs", "--rank", "0") == "[0] rank zero says hello\n"


def test_a_run_that_has_only_begun_is_followed_from_its_first_step(
    running: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line that `--detach` prints, which people type before anything is written."""
    folder = create_run(None, "new")
    record = {"run": folder.identity, "folder": str(folder.path), "pid": running[0].pid, "born": birth(running[0].pid)}
    (home() / "new.json").write_text(json.dumps({**record, "started": 9.0, "hosts": {}}))

    def goes_on(_: float) -> None:
        if folder.metrics.is_file():
            running[0].kill()
            running[0].wait()
            return
        write_yaml(folder.recipe, {"train": {"steps": 7}}, header="a recipe")
        folder.append_metrics({"step": 1, "loss": 4.0, "tokens_per_s": 100.0})
        (folder.path / "logs").mkdir()
        folder.log(0).write_text("")

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=goes_on, monotonic=time.monotonic))
    assert shown("logs", "-f").splitlines()[:2] == [
        f"run {folder.name}: running",
        "step 1/7  loss 4.0000  100 tokens/s",
    ]


def test_stop_without_a_name_ends_the_only_run_and_names_it_first(running: list[subprocess.Popen[bytes]]) -> None:
    delist("first")
    # the test is the parent: a process that has ended, and was not waited for, is a zombie, which counts as gone
    said = shown("stop").splitlines()
    assert said[0] == "stopping second (/runs/second)"
    assert said[-1] == "second has ended"
    assert running[1].wait() == 0
    assert running[0].poll() is None


def test_stop_without_a_name_ends_none_of_several_unasked(running: list[subprocess.Popen[bytes]]) -> None:
    error = error_of("stop")
    assert {*error.message.partition("running are: ")[2].split(", ")} == {"first", "second"}
    assert [p.poll() for p in running] == [None, None]
    delist("first")
    delist("second")
    assert "no run is running here" in error_of("stop").message


def test_a_supervisor_that_only_dies_has_not_stopped_its_run(running: list[subprocess.Popen[bytes]]) -> None:
    os.kill(running[0].pid, signal.SIGSTOP)  # KILL comes while it is asked to end
    threading.Timer(1.0, running[0].kill).start()
    error = CliRunner().invoke(app, ["stop", "first"]).exception
    assert isinstance(error, WorkFailed)
    assert error.message == "first is over, and nothing says that its hosts are clear"
    assert error.hint == "hetctl clean first"


def test_one_run_that_cannot_be_cleaned_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: str, hosts: object) -> None:
        raise WorkFailed("kubectl refused it")

    monkeypatch.setitem(RELEASES, "kubernetes", refuse)
    home().mkdir(parents=True, exist_ok=True)
    for name, way, started in (("pods", "kubernetes", 2.0), ("none", "ssh", 1.0)):
        record = {"run": name, "folder": f"/runs/{name}", "pid": 0, "born": "gone", "way": way}
        (home() / f"{name}.json").write_text(json.dumps({**record, "started": started, "hosts": {}}))
    error = CliRunner().invoke(app, ["clean"]).exception
    assert isinstance(error, Unreachable)
    assert error.message == "could not verify pods (kubectl refused it)"
    assert [run.run for run in active()] == ["pods"]


def test_stray_files_of_a_run_folder_are_passed_over() -> None:
    folder = a_run("one", status="failed", failure="x")
    folder.log(0).with_name("rank-0-before.log").write_text("old words\n")
    (folder.path / "summary.json").write_text('{"failure": "x"}')
    assert called("logs", folder.name)["lines"] == [{"rank": 0, "line": "rank zero says hello"}]
    assert [row["verdict"] for row in called("ps", "-a")["runs"]] == ["?: x"]


def test_a_run_does_not_replace_a_persons_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("# mine\n")
    for named in (Path(), tmp_path):
        with pytest.raises(ConfigError, match=r"holds a recipe\.yaml that no run wrote"):
            create_run(named, "demo")
    folder = create_run(tmp_path / "other", "demo")
    assert folder.identity
    folder.recipe.write_text("{}")
    assert create_run(folder.path, "demo").path == folder.path, "a run's own folder goes on"


def test_a_run_under_way_is_not_handed_on_again(running: list[subprocess.Popen[bytes]]) -> None:
    folder = a_run("one")
    record = json.loads((home() / "first.json").read_text()) | {"run": folder.identity, "folder": str(folder.path)}
    (home() / f"{folder.identity}.json").write_text(json.dumps(record))
    (folder.path / CONSOLE).write_text("its words\n")
    with pytest.raises(ConfigError, match="supervises"):
        run_in_background(Handover(), folder, Sink(as_json=True))
    assert (folder.path / CONSOLE).read_text() == "its words\n"
    assert not (folder.launch / "handover.json").exists()


def test_a_run_that_does_not_start_says_its_own_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run("one")
    (folder.path / CONSOLE).write_text("of the attempt before\n")
    monkeypatch.setattr("hetctl.runs.handover._argv", lambda _: [sys.executable, "-S", "-c", "raise SystemExit('why')"])
    with pytest.raises(WorkFailed) as caught:
        run_in_background(Handover(), folder, Sink(as_json=True))
    assert caught.value.message == "the run did not start: why"
    assert (folder.path / CONSOLE).read_text() == "of the attempt before\nwhy\n"


def test_a_time_that_no_clock_has_is_refused() -> None:
    for words in (["exec", "localhost", "--timeout", "inf", "--", "true"], ["stop", "--timeout", "nan", "x"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "is not from 0 to 10,000,000 seconds" in " ".join(result.output.replace("│", " ").split())


def test_stop_asks_on_a_terminal_which_of_several(running: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    number = [run.name for run in active()].index("first") + 1
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    code, text = on_a_terminal("stop", typed=f"{number}\n", cwd=tmp_path, env=environment)
    assert code == 0, text
    assert "stop which run? 1 to 2, or a name" in text
    assert running[0].wait() == 0
    assert running[1].poll() is None


def test_a_plan_of_no_model_asks_for_one_on_a_terminal_and_is_an_error_elsewhere(tmp_path: Path) -> None:
    error = error_of("plan", "--emulate", "h200:1")
    assert error.exit_code == 2
    assert "hetctl models" in error.hint
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    words = ("plan", "--emulate", "h200:1", "--seq-len", "128", "--global-batch", "8")
    code, text = on_a_terminal(*words, typed="llama-160m\n", cwd=tmp_path, env=environment)
    assert code == 0, text
    assert "which model?" in text
    assert "llama-160m: 8 samples of 128 tokens" in text
    code, text = on_a_terminal(*words, typed="\n", cwd=tmp_path, env=environment)
    assert code == 2, text


def test_the_environment_of_a_host_needs_no_model() -> None:
    assert "no rank of the plan is on 'nowhere'" in error_of("plan", "--emulate", "h200:1", "--env", "nowhere").message


def test_models_and_devices_are_listed_with_what_matters() -> None:
    models = {row["name"]: row for row in called("models")["models"]}
    assert models.keys() == SHAPES.keys()
    assert models["demo"]["parameters"] == SHAPES["demo"].parameters
    assert not models["gpt-1.7b"]["trains"]
    lines = [line for line in shown("models").splitlines() if line.split()[:1] == ["gpt-1.7b"]]
    assert lines[0].rstrip().endswith("plan only")
    devices = {row["name"]: row for row in called("devices")["devices"]}
    assert devices.keys() == CLASSES.keys()
    assert devices["h200"]["memory_bytes"] == CLASSES["h200"].memory_bytes
    assert devices["cpu"]["peak_tflops"] is None
    assert "h200" in shown("devices")


def test_export_takes_the_newest_run_where_none_is_named() -> None:
    folder = a_run("one", status="done")
    assert folder.path.name in str(error_of("export", "--to", "model"))
    assert folder.path.name in str(error_of("export", folder.name, "--to", "model"))
    assert "there is no runs/latest here" in str(_without_runs())


def test_a_run_that_is_not_there_is_told_the_nearest_ones() -> None:
    name = a_run("one", status="done").name
    for command in ("logs", "report", "resume"):
        error = error_of(command, name[:-1])
        assert (error.message, error.exit_code) == (f"there is no run '{name[:-1]}'", 2)
        assert f"did you mean '{name}'" in error.hint


def test_export_without_a_folder_says_what_to_type() -> None:
    error = error_of("export")
    assert (error.message, error.exit_code) == ("nothing names the folder that the model is written to", 2)
    assert error.hint == "hetctl export --to my-model"


def test_figures_that_say_nothing_of_shared_cores_are_in_no_log_nor_report(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run("one")
    folder.append_metrics({"step": 9, "loss": 2.0, "tokens": 8, "tokens_per_s": 1.0, "efficiency": 0.2})
    for shared in (False, True):
        monkeypatch.setattr("hetctl.runs.resume.kept", lambda _, shared=shared: SimpleNamespace(shares_cores=shared))
        assert ("efficiency" in shown("logs", folder.name)) == (not shared)


def _without_runs() -> ConfigError:
    Path("runs/latest").unlink()
    return error_of("export", "--to", "model")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hetctl resume 2", "run"),
        ("hetctl logs ", "run"),
        ("hetctl export l", "latest"),
        ("hetctl plan --model llama-16", "llama-160m"),
        ("hetctl train --emulate h200:1,mi325", "h200:1,mi325x:"),
    ],
)
def test_a_shell_completes(line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run("one")
    environment = {
        "_HETCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    program = "import hetctl.app; hetctl.app.app(prog_name='hetctl')"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert (folder.name if words == "run" else words) in done.stdout.split(), done


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in shown("--help")
