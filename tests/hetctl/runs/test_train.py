"""`hetctl train` end to end on this machine: a whole run, an interrupted one, a rank that dies, a resumed one."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract.plan import load_plan
from tests.busy import busy
from tests.hetctl.process import hetctl_json
from tests.hetctl.runs.test_metrics_writers import events

ROOT = Path(__file__).parents[3]
WHOLE = ("steps", "first_loss", "last_loss", "tokens")  # of the run, however often it was resumed
UNEVEN = "h200:1,mi325x:2"
SMALL = ("model.seq_len=32", "batch.global_batch=8", "train.validation_samples=8", "optimizer.warmup_steps=2")


def command(run: Path, *more: str, steps: int, islands: str = "h200:1,mi325x:1") -> list[str]:
    settings = [word for key in (*SMALL, f"train.steps={steps}") for word in ("--set", key)]
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", islands, "--run-dir", str(run)]
    return [*argv, *settings, *more]


def start(run: Path, *more: str, steps: int, islands: str = "h200:1,mi325x:1") -> subprocess.Popen[str]:
    argv = command(run, *more, steps=steps, islands=islands)
    return subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def processes_of(run: Path) -> list[int]:
    """Processes whose environment names a file of this run: its ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(run / "launch").encode() in environment:
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return value


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 12 steps, the third traced, held against one process, and the document `--json` printed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    argv = command(run, "--json", "--profile-step", "3", "--check-parity", steps=12, islands=UNEVEN)
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return run, document


def test_the_summary_says_what_the_run_came_to(whole: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole
    assert json.loads((run / "summary.json").read_text()) == document
    assert document["status"] == "done"
    assert document["last_loss"] < 0.8 * document["first_loss"]
    assert 0 < document["validation_loss"] < document["first_loss"]
    assert document["tokens"] == 12 * 8 * 32
    assert document["tokens_per_s"] > 0
    assert document["bridge_bytes"] > 0
    assert document["wall_s"] > 0
    assert document["processes_left"] == 0
    assert 0 < document["bubble_share"] < 1
    assert 0 < document["bridge_share"] < 1
    assert sum(document["shares"].values()) == pytest.approx(1, abs=0.02)


def test_the_run_knows_what_its_hosts_compute_with(whole: tuple[Path, dict[str, Any]]) -> None:
    (versions,) = json.loads((whole[0] / "versions.json").read_text()).values()
    assert versions == {"python": platform.python_version(), "torch": torch.__version__}


def test_its_first_losses_are_those_of_one_process(whole: tuple[Path, dict[str, Any]]) -> None:
    parity = whole[1]["parity"]
    assert (parity["steps"], parity["precision"], parity["equal"]) == (5, "fp32", True)
    assert 0 < parity["worst_deviation"] < 1e-5 < parity["allowed"] < 1e-3


def test_a_traced_step_shows_its_actions_and_what_it_sent(whole: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole
    sent = 0
    for rank in range(3):
        trace = json.loads((run / "profile" / f"rank-{rank}.json").read_text())
        calls = [e["ts"] for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
        actions = [e for e in trace["traceEvents"] if e.get("tid") == "actions"]
        assert {e["name"].split()[0] for e in actions} >= {"F", "B", "update"}
        middle = (actions[0]["ts"] + actions[-1]["ts"]) / 2
        assert min(calls) < middle < max(calls), "the two clocks differ"
        counted = [e["args"]["MB"] for e in trace["traceEvents"] if e.get("name") == "sent across islands"]
        assert counted[-1] == trace["hetctl"]["sent_bytes"] / 1e6
        assert counted == sorted(counted)
        sent += trace["hetctl"]["sent_bytes"]
    assert sent == pytest.approx(document["bridge_bytes"] / 12, rel=0.2)


def test_the_summary_knows_the_islands(whole: tuple[Path, dict[str, Any]]) -> None:
    islands = {i["name"]: i for i in whole[1]["islands"]}
    assert {n: i["vendor"] for n, i in islands.items()} == {"h200": "nvidia", "mi325x": "amd"}
    assert islands["h200"]["ranks"] == [0]
    assert islands["mi325x"]["ranks"] == [1, 2]
    assert sorted(tuple(s) for i in islands.values() for s in i["layers"])[0][0] == 0
    assert max(s[1] for i in islands.values() for s in i["layers"]) == 8


def test_the_run_folder_holds_what_it_promises(whole: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole
    for name in ("plan.yaml", "recipe.yaml", "metrics.jsonl", "summary.json", "report.html", "checkpoints"):
        assert (run / name).exists(), name
    assert not (run / "failure.json").exists()
    assert {f"rank-{r}.log" for r in range(3)} <= {p.name for p in (run / "logs").iterdir()}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 13))
    wanted = {"step", "loss", "tokens", "tokens_per_s", "step_time_s", "grad_norm", "lr", "efficiency"}
    assert all(wanted <= set(m) for m in metrics)
    assert metrics[-1]["loss"] == document["last_loss"]
    page = (run / "report.html").read_text()
    assert "aria-label='loss over steps'" in page
    assert ">measured</div>" in page
    assert ">predicted</div>" not in page, "of processes that share cores"
    assert not re.search(r"(src|href)=['\"]?http|url\(", page), "it needs no network"


@pytest.mark.slow
def test_validation_takes_no_time_from_the_figures_of_training(tmp_path: Path) -> None:
    """After every step it looks at far more samples than a step trains on."""
    settings = ("train.validate_every=1", "train.validation_samples=256")
    words = [word for key in settings for word in ("--set", key)]
    argv = command(tmp_path / "run", "--json", *words, steps=4)
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["validations"]) == 3
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert document["train_s"] < 3 * sum(m["step_time_s"] for m in told)
    assert document["tokens_per_s"] == pytest.approx(document["tokens"] / document["train_s"])


def test_a_run_is_held_against_the_sum_of_its_parts(whole: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole
    predicted = load_plan(run / "plan.yaml").predicted
    assert predicted is not None
    assert predicted.efficiency is not None
    parts = predicted.tokens_per_s / predicted.efficiency
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["efficiency"] for m in told] == pytest.approx([m["tokens_per_s"] / parts for m in told])
    assert document["efficiency"] == pytest.approx(document["tokens_per_s"] / parts)
    assert document["efficiency_basis"] == "table"
    drawn = {name: value for step, name, value in events(run / "tensorboard") if step == 12}
    assert drawn["efficiency"] == pytest.approx(told[-1]["efficiency"])
    page = (run / "report.html").read_text()
    assert "would reach alone" not in page, "processes that share cores are held against nothing that people read"
    # nobody knows this machine's peak: no figure, rather than one against a guess
    assert document["mfu"] is None
    assert not any("mfu" in m for m in told)
    assert "mfu" not in drawn
    assert "MFU" not in page


def test_islands_tell_where_their_time_and_memory_go(whole: tuple[Path, dict[str, Any]]) -> None:
    run, document = whole
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(m["islands"] for m in told if "islands" in m)
    assert set(first) == {"h200", "mi325x"}
    for found in first.values():
        assert 0 < found["compute_s"] < found["step_s"] < document["wall_s"]
        assert found["memory_bytes"] > 0
        parts = [found[f"{name}_s"] for name in ("compute", "bridge_wait", "update", "other_wait")]
        assert sum(parts) == pytest.approx(found["step_s"])
    # the first rank's steps lie inside what it reports as their time; other ranks may begin and end earlier
    assert first["h200"]["step_s"] < max(m["step_time_s"] for m in told)
    page = (run / "report.html").read_text()
    for island in document["islands"]:
        assert sum(island["shares"].values()) == pytest.approx(1, abs=0.02)
        assert island["memory_bytes"] == max(document["memory_bytes"][rank] for rank in island["ranks"])
        assert f"<td>{island['shares']['compute']:.1%}</td>" in page


def test_a_report_is_made_anew_and_of_a_run_without_a_summary_too(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, document = whole
    page = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert report(run)["last_loss"] == document["last_loss"]
    assert (run / "report.html").read_text() == page
    lost = tmp_path / "run"
    shutil.copytree(run, lost)
    (lost / "summary.json").unlink()
    told = report(lost)
    assert (told["status"], told["steps"], told["wall_s"]) == ("ended without a summary", 12, None)
    assert told["efficiency"] > 0
    page = (lost / "report.html").read_text()
    assert "unknown" not in page.split("<script>")[0]
    assert "wall time" not in page


def report(run: Path) -> dict[str, Any]:
    done = hetctl_json("report", str(run))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint_as_if_never_stopped(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """12 steps at once, or 5, a checkpoint, a new process, and 7: the same losses to the last digit."""
    run = tmp_path / "run"
    first = start(run, "--set", "checkpoint.every=5", steps=12, islands=UNEVEN)
    wait_for(lambda: (run / "checkpoints" / "step-00000005").is_dir())
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=400)
    argv = command(run, steps=12, islands=UNEVEN)
    again = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    losses = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        losses[json.loads(line)["step"]] = json.loads(line)["loss"]
    wanted = [json.loads(line)["loss"] for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    assert [losses[s] for s in range(1, 13)] == wanted
    summary = json.loads((run / "summary.json").read_text())
    assert {k: summary[k] for k in WHOLE} == {k: whole[1][k] for k in WHOLE}


def test_ctrl_c_once_stops_cleanly(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, "--json", steps=100_000)
    wait_for(lambda: steps_done(run) >= 2)
    process.send_signal(signal.SIGINT)
    document, errors = process.communicate(timeout=400)
    assert process.returncode == 130
    assert json.loads(document)["status"] == "interrupted"
    assert "interrupted" in errors
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 2
    assert summary["processes_left"] == 0
    assert processes_of(run) == []
    assert list((run / "checkpoints").glob("step-*")), "an interrupted run keeps what it learned"


def test_ctrl_c_before_the_first_step_stops_cleanly(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, steps=100_000)
    wait_for(lambda: processes_of(run))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=400)
    assert process.returncode == 130
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert processes_of(run) == []


def test_a_rank_that_dies_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, steps=100_000)
    wait_for(lambda: steps_done(run) >= 2)
    victim = next(p for p in processes_of(run) if b"RANK=1\0" in (Path("/proc") / str(p) / "environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 1
    failure = json.loads((run / "failure.json").read_text())
    assert failure["rank"] == 1
    assert "SIGKILL" in failure["reason"]
    assert "rank 1" in errors
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert processes_of(run) == []


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, steps=100_000)
    wait_for(lambda: steps_done(run) >= 1)
    process.kill()
    process.communicate(timeout=400)
    wait_for(lambda: processes_of(run) == [], seconds=20 * busy())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_layers_of_a_lopsided_plan_move_at_a_checkpoint(schedule: str, tmp_path: Path) -> None:
    """A plan edited so that one stage has all layers but one: its ranks cut it anew, and the run goes on."""
    run, plan = tmp_path / "run", tmp_path / "plan.yaml"
    words = [sys.executable, "-m", "hetctl", "plan", "--model", "demo", "--emulate", "h200:1,mi325x:1", "-o", str(plan)]
    even = ("parallelism.layers=[4,4]", f"parallelism.schedule={schedule}", "batch.micro_batch_size=2")
    words += [word for key in even for word in ("--set", key)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    text = plan.read_text()
    assert text.count("layers: [0, 4]") == text.count("layers: [4, 8]") == 2, "what the edits below are for"
    plan.write_text(text.replace("layers: [0, 4]", "layers: [0, 7]").replace("layers: [4, 8]", "layers: [7, 8]"))
    words = [sys.executable, "-m", "hetctl", "train", "--plan", str(plan), "--run-dir", str(run), "--adapt"]
    settings = ("train.steps=24", "checkpoint.every=8", "train.validation_samples=16")
    done = subprocess.run(
        [*words, *(word for key in settings for word in ("--set", key))], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    first = summary["recut"][0]
    assert (first["step"], first["before"]) == (8, [[7, 1]])
    (after,) = first["after"]
    assert sum(after) == 8
    assert after != [7, 1]  # to where it moves depends on how busy this machine is just then
    (last,) = summary["recut"][-1]["after"]
    assert f"<td>0-{last[0] - 1}" in (run / "report.html").read_text(), "the report shows how the run ended"
    assert "layers follow speeds from step 9 on: [[7, 1]] ->" in done.stderr + done.stdout
    assert summary["steps"] == 24
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "loss" in m] == list(range(1, 25))
