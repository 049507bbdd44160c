"""`hetctl generate`: from a run's checkpoint and from the folder that was exported from it, the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hetctl.runs.test_export import hetctl

PROMPT = "import os"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt its first words."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("import os, sys\n" * 400)
    settings = ("model.seq_len=32", "batch.global_batch=8", "train.steps=60", f"data.source={folder / 'text.txt'}")
    words = [word for s in (*settings, "optimizer.lr=5.0e-3", "optimizer.warmup_steps=1") for word in ("--set", s)]
    done = hetctl("train", "--emulate", "h200:1,mi325x:1", "--run-dir", str(folder / "run"), *words)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_trained_model_goes_on_as_it_was_taught(run: Path) -> None:
    done = hetctl("generate", PROMPT, "--model", str(run), "--tokens", "12")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["text"] == PROMPT
    assert found["continuation"].startswith(", sys\nimport"), found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("",), "the text is 0 tokens, it must be 1 to 1023 for this model"),
        (("a" * 2000,), "the text is 2000 tokens"),
    ],
)
def test_texts_that_cannot_be_continued(run: Path, words: tuple[str, ...], message: str) -> None:
    done = hetctl("generate", *words, "--model", str(run))
    assert done.returncode == 2
    assert message in json.loads(done.stdout)["error"]


def test_a_folder_without_its_tokenizer_is_named(run: Path, tmp_path: Path) -> None:
    assert hetctl("export", str(run), "--to", str(tmp_path / "model")).returncode == 0
    done = hetctl("generate", PROMPT, "--model", str(tmp_path / "model"))
    assert done.returncode == 2
    assert "has no tokenizer.json" in json.loads(done.stdout)["error"]


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    done = hetctl("generate", PROMPT, "--model", str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
