"""Fine-tuning from a Hugging Face folder and back into one: `hetctl train --model DIR`, `hetctl export`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.trainer.data.samples import PackedTokens
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.recipe import DataSection

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent.parent
SETTINGS = (
    "model.seq_len=32",
    "batch.global_batch=4",
    "train.steps=3",
    "train.validation_samples=4",
    "train.precision=fp32",
    "optimizer.warmup_steps=1",
)


def hetctl(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hetctl", *words, "--json"]
    return subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)


def train(folder: Path, run: Path) -> subprocess.CompletedProcess[str]:
    settings = [word for s in SETTINGS for word in ("--set", s)]
    return hetctl("train", "--emulate", "h200:1,mi325x:1", "--model", str(folder), "--run-dir", str(run), *settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "model"


def test_fine_tune_and_export(folder: Path, tmp_path: Path) -> None:
    done = train(folder, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    tokens = open_tokens(DataSection())
    inputs, targets = PackedTokens(tokens.train, seq_len=32, global_batch=4, seed=0).batch(0, 0, 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.as_tensor(inputs)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten()).item()
    assert summary["first_loss"] == pytest.approx(expected, abs=1e-4)

    out = hetctl("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--precision", "fp32")
    assert out.returncode == 0, out.stderr
    document = json.loads(out.stdout)
    assert document["step"] == 3
    assert "tokenizer_config.json" in document["files"]
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        after = torch.nn.functional.cross_entropy(
            tuned(torch.as_tensor(inputs)).logits.flatten(0, 1), torch.as_tensor(targets).flatten()
        ).item()
    assert after < expected - 0.05
    again = hetctl("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_weights_cut_short_stop_it_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = train(folder, tmp_path / "run")
    assert done.returncode == 2
    assert "damaged or cut short" in done.stderr
    assert not (tmp_path / "run").exists()
