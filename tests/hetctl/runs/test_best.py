"""Best checkpoints by the commands: a run that overfits ends early, and `--step best` is what it was before that."""

from __future__ import annotations

import json
from pathlib import Path

from tests.hetctl.process import hetctl_json as hetctl

SETTINGS = (
    "model.seq_len=32",
    "batch.global_batch=8",
    "train.steps=120",
    "train.validation_samples=8",
    "train.validate_every=4",
    "train.patience=2",
    "optimizer.lr=0.1",
    "optimizer.warmup_steps=0",
    "checkpoint.keep=1",
    "checkpoint.keep_best=true",
)


def test_a_run_that_gets_no_better_ends_and_its_best_is_exported(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{n * n % 9973} and {n * 7919 % 104729}; " for n in range(900)))
    run = str(tmp_path / "run")
    settings = [word for s in (*SETTINGS, f"data.source={text}") for word in ("--set", s)]
    done = hetctl("train", "--emulate", "h200:1,mi325x:1", "--run-dir", run, *settings)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "done"
    assert summary["stalled"] == 2
    assert summary["steps"] == summary["best_step"] + 8 < 120
    losses = {v["step"]: v["validation_loss"] for v in summary["validations"]}
    assert min(losses, key=lambda step: losses[step]) == summary["best_step"]
    assert f"{summary['best_step']}, validation loss {summary['best_validation_loss']:.4f}" in done.stderr
    assert "ended early" in done.stderr
    assert "Ended early: 2 validations in a row" in Path(run, "report.html").read_text()

    best = hetctl("export", run, "--step", "best", "--to", str(tmp_path / "best"))
    assert json.loads(best.stdout)["step"] == summary["best_step"], best.stderr
    last = hetctl("export", run, "--step", str(summary["steps"]), "--to", str(tmp_path / "last"))
    assert json.loads(last.stdout)["step"] == summary["steps"], last.stderr
    lost = hetctl("export", run, "--step", "1", "--to", str(tmp_path / "lost"))
    assert (lost.returncode, f"there are: {summary['best_step']}, {summary['steps']}" in lost.stderr) == (2, True)
    said = hetctl("generate", "1 and", "--model", run, "--step", "best", "--tokens", "2")
    assert f"step-{summary['best_step']:08d}" in json.loads(said.stdout)["model"], said.stderr

    again = hetctl("resume", run)
    assert again.returncode == 2
    assert "is finished: 2 validations in a row had no lower loss" in again.stderr
    further = hetctl("resume", run, "--step", "best", "--set", "train.patience=1", "--set", "optimizer.lr=0.5")
    assert further.returncode == 0, further.stderr
    assert f"continuing from step {summary['best_step']}" in further.stderr
