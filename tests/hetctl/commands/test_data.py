"""`hetctl data show`: samples as the model meets them, what bears loss, and what became of long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from tests.trainer.data.chats import BY_PREFIX, TALKS, chat_file, tokenizer_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def show(*words: str) -> str:
    done = CliRunner().invoke(app, ["data", "show", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_samples_are_shown_with_what_bears_loss(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", BY_PREFIX["chatml"])
    long = {"prompt": "Is it? " * 99, "completion": "Yes."}
    path = chat_file(tmp_path / "chats.jsonl", [*[{"messages": TALKS[0]}] * 30, long])
    asked = (
        "--data",
        str(path),
        "--set",
        f"data.tokenizer={folder}",
        "--model",
        "llama-160m",
        "--seq-len",
        "90",
        "-n",
        "1",
        "--set",
        "data.seed=1",
    )
    shown = show(*asked)
    assert shown.startswith("chats.jsonl#1: ")
    assert "      | <|im_start|>assistant\\n\n loss | Yes.<|im_end|>\\n\n" in shown
    assert shown.count("chats.jsonl#") == 1
    assert "of more than 90 tokens: 0 cut, 1 dropped" in shown
    found = json.loads(show(*asked, "--json"))
    (sample,) = found["samples"]
    assert "".join(sample["pieces"]) == sample["text"]
    assert "".join(p for p, b in zip(sample["pieces"], sample["bears_loss"], strict=True) if b) == "Yes.<|im_end|>\n"
    kept: list[dict[str, Any]] = found["counts"]
    assert sum(side["conversations"] for side in kept) == 30
    assert all(0 < side["loss_share"] == side["tokens_with_loss"] / side["tokens"] < 1 for side in kept)


def test_both_answers_of_a_pair_are_shown(tmp_path: Path) -> None:
    row = {"prompt": "Is it?", "chosen": "Yes.", "rejected": "No."}
    path = chat_file(tmp_path / "pairs.jsonl", [row] * 30)
    asked = ("--data", str(path), "--set", "data.template=chatml", "--seq-len", "160", "-n", "1")
    shown = show(*asked)
    assert shown.count("pairs.jsonl#") == 2
    for side, answer in (("chosen", "Yes."), ("rejected", "No.")):
        said = shown[shown.index(f"pairs.jsonl#1, {side}: ") :].split("\n\n")[0]
        assert f" loss | {answer}<|im_end|>" in said
    found = json.loads(show(*asked, "--json"))
    assert [sample["side"] for sample in found["samples"]] == ["chosen", "rejected"]
    assert sum(counts["pairs"] for counts in found["counts"]) == 30


def test_texts_bear_loss_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("日 one\ntwo\x07" * 2000)
    shown = show("--data", str(tmp_path / "a.txt"))
    assert " loss | 日 one\\n\n loss | two\\x07日 one\\n\n" in shown
    (tmp_path / "b.bin").write_bytes(b"")
    (tmp_path / "b.idx").write_bytes(b"")
    refused = CliRunner().invoke(app, ["data", "show", "--data", str(tmp_path / "b.bin")])
    assert "is tokens already" in str(refused.exception)
