"""Conversations from a file to a trained model: over two islands, interrupted, gone on with in another layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hetctl.process import hetctl_json
from tests.trainer.data.chats import chat_file

SETTINGS = ("data.template=chatml", "train.steps=6", "checkpoint.every=3", "train.precision=fp64", "data.packing=true")


def train(data: Path, run: Path, *more: str) -> Any:
    settings = [word for s in SETTINGS for word in ("--set", s)]
    words = ["--data", str(data), "--seq-len", "96", "--global-batch", "4", "--run-dir", str(run), *settings]
    return hetctl_json("train", "--emulate", "h200:1,mi325x:1", *words, *more)


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


def pair_file(folder: Path) -> Path:
    rows = [{"prompt": f"{n}?", "chosen": "y" * (n % 9 + 1), "rejected": "no"} for n in range(60)]
    return chat_file(folder / "pairs.jsonl", rows)


@pytest.mark.slow
def test_preferences_train_and_go_on_in_another_layout(tmp_path: Path) -> None:
    pairs, asked = pair_file(tmp_path), ("--seq-len", "320", "--lora", "4", "--dpo", "0.1")
    done = train(pairs, tmp_path / "whole", *asked)
    assert done.returncode == 0, done.stderr
    assert "pairs in " in done.stderr
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert 0 < summary["validation_accuracy"] <= 1
    from_three = ("--resume", str(tmp_path / "whole" / "checkpoints" / "step-00000003"))
    other = train(pairs, tmp_path / "other", *asked, *from_three, "--set", "parallelism.pipeline=1")
    assert other.returncode == 0, other.stderr
    wanted, found = losses(tmp_path / "whole"), losses(tmp_path / "other")
    assert sorted(found) == [4, 5, 6]
    assert all(abs(found[step] - wanted[step]) < 1e-10 for step in found)
    assert len(set(wanted.values())) == 6
    steeper = train(pairs, tmp_path / "whole", *asked[:-1], "0.2", "--set", "train.steps=7")
    assert "dpo.beta was 0.1 before the checkpoint and is 0.2 now: another loss follows on it" in steeper.stderr


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--lora", "4"), "holds preference pairs, and nothing says to train on them"),
        (("--dpo", "0.1"), "dpo compares adapters with the model without them"),
        (("--lora", "4", "--dpo", "-1"), "dpo.beta must be finite and positive"),
        (("--lora", "4", "--dpo", "0.1", "--data", "docs"), "the rows of '.*docs' are none"),
    ],
)
def test_pairs_and_what_is_asked_of_them_are_checked_before_anything_starts(
    asked: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = train(pair_file(tmp_path), tmp_path / "run", *asked)
    assert done.returncode == 2
    assert re.search(words, done.stderr)
    assert not (tmp_path / "run").exists()
