"""Conversations from a file to a trained model: over two islands, interrupted, gone on with in another layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.chats import chat_file

ROOT = Path(__file__).parents[3]
SETTINGS = ("data.template=chatml", "train.steps=6", "checkpoint.every=3", "train.precision=fp64", "data.packing=true")


def train(data: Path, run: Path, *more: str) -> Any:
    settings = [word for s in SETTINGS for word in ("--set", s)]
    words = ["--data", str(data), "--seq-len", "96", "--global-batch", "4", "--run-dir", str(run), "--json", *settings]
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", "h200:1,mi325x:1", *words, *more]
    return subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_packed_conversations_train_and_go_on_in_another_layout(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "y" * (n % 40 + 1)} for n in range(60)]
    chats = chat_file(tmp_path / "chats.jsonl", rows)
    done = train(chats, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert "conversations in " in done.stderr
    from_three = ("--resume", str(tmp_path / "whole" / "checkpoints" / "step-00000003"))
    other = train(chats, tmp_path / "other", *from_three, "--set", "parallelism.pipeline=1")
    assert other.returncode == 0, other.stderr
    wanted, found = losses(tmp_path / "whole"), losses(tmp_path / "other")
    assert sorted(found) == [4, 5, 6]
    assert all(abs(found[step] - wanted[step]) < 1e-10 for step in found)
