"""Fine-tuning from a Hugging Face folder and back into one: `hetctl train --model DIR`, `hetctl export`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hetctl.commands.export import Precision
from hetctl.runs.export import DTYPES, NAMES, copy_tokenizer
from hetctl.trainer.data.datasets import PackedTokens
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.model.adapters import MAGNITUDE
from hetctl.trainer.model.quantised import dequantise, quantise
from hetctl.trainer.recipe import DataSection
from tests.hetctl.process import hetctl_json as hetctl

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
SETTINGS = (
    "model.seq_len=32",
    "batch.global_batch=4",
    "train.steps=3",
    "data.source=python-stdlib",
    "optimizer.lr=2.0e-3",
    "train.validation_samples=4",
    "train.precision=fp32",
    "optimizer.warmup_steps=1",
)


def train(folder: Path, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    settings = [word for s in (*SETTINGS, *more) for word in ("--set", s)]
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
    assert "generation_config.json" in document["files"]
    assert "tokenizer_config.json" not in document["files"], "it was trained on bytes"
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        after = torch.nn.functional.cross_entropy(
            tuned(torch.as_tensor(inputs)).logits.flatten(0, 1), torch.as_tensor(targets).flatten()
        ).item()
    assert after < expected - 0.05
    again = hetctl("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize("more", [(), ("lora.dora=true",), ("lora.quantize=nf4",)], ids=["lora", "dora", "nf4"])
def test_adapters_are_trained_exported_merged_and_kept_to_their_base(folder: Path, more: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run, base = tmp_path / "run", {p.name: p.read_bytes() for p in folder.iterdir()}
    done = train(folder, run, "lora.rank=4", "checkpoint.every=2", *more)
    assert done.returncode == 0, done.stderr
    for to, how in (("peft", ()), ("merged", ("--merge",))):
        out = hetctl("export", str(run), "--to", str(tmp_path / to), "--precision", "fp32", *how)
        assert out.returncode == 0, out.stderr
    assert {p.name for p in (tmp_path / "peft").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    tokens = torch.randint(0, 257, (2, 32))
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
        before = plain(tokens).logits
        for name, weight in plain.named_parameters() if "lora.quantize=nf4" in more else ():
            if ".layers." in name and weight.dim() == 2:
                weight.copy_(dequantise(quantise(weight, "nf4"), "nf4", weight.shape[1], weight.dtype))
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    assert float((merged - adapted).abs().max()) < 1e-5 < 1e-3 < float((adapted - before).abs().max())
    for name, rows in load_file(tmp_path / "peft/adapter_model.safetensors").items():
        if name.endswith(MAGNITUDE):
            weight = name.removeprefix("base_model.model.").replace(MAGNITUDE, "weight")
            norms = load_file(folder / "model.safetensors")[weight].norm(dim=1)
            assert 0 < float((rows / norms - 1).abs().max()) < 0.1, "they begin as what the folder's rows have"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == base

    transformers.Qwen2ForCausalLM(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    for refused in (
        train(folder, run, "lora.rank=4", "train.steps=4", *more),
        hetctl("export", str(run), "--to", str(tmp_path / "no"), "--merge"),
    ):
        assert refused.returncode == 2
        assert "has adapters of other weights" in refused.stderr
    whole = hetctl("export", str(run), "--to", str(tmp_path / "as-adapters"))
    assert whole.returncode == 0, "the adapters are what they were"


def test_every_precision_that_export_offers_is_one_it_knows() -> None:
    assert set(Precision) == set(DTYPES) == set(NAMES) == {"bf16", "fp16", "fp32"}


def write_tokenizer(folder: Path) -> None:
    """Single letters and an end, in an order of their own."""
    letters = "<|endoftext|> etaoinshrdlu"
    words = {"<|endoftext|>": 0, "[UNK]": 1} | {letter: n for n, letter in enumerate(letters[13:], start=2)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.slow
def test_the_model_s_own_tokenizer_is_taken_and_exported(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder)
    text = tmp_path / "a.txt"
    text.write_text("the rain and the tide " * 200)
    done = train(folder, tmp_path / "run", f"data.source={text}")
    assert done.returncode == 0, done.stderr
    assert f"data: {text}, tokenizer {folder}/tokenizer.json" in done.stderr.replace("\n", "")
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["data"]["tokenizer"] == f"{folder}/tokenizer.json"
    tokens = open_tokens(DataSection(source=str(text), tokenizer=f"{folder}/tokenizer.json"))
    assert tokens.vocabulary < 30
    inputs, targets = PackedTokens(tokens.train, seq_len=32, global_batch=4, seed=0).batch(0, 0, 4)
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.as_tensor(inputs)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten()).item()
    assert json.loads(done.stdout)["first_loss"] == pytest.approx(expected, abs=1e-4)
    out = hetctl("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert out.returncode == 0, out.stderr
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(json.loads(out.stdout)["files"])
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_only_the_tokenizer_that_made_the_tokens_is_exported(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder)
    (tmp_path / "other").mkdir()
    other, out = tmp_path / "other" / "mine.json", tmp_path / "out"
    other.write_text("{}")
    out.mkdir()
    corpus = tmp_path / "corpus.bin"
    assert copy_tokenizer(DataSection(), folder, out) == []
    assert copy_tokenizer(DataSection(tokenizer=str(other)), folder, out) == ["tokenizer.json"]
    assert (out / "tokenizer.json").read_text() == "{}"
    both = ["tokenizer.json", "tokenizer_config.json"]
    assert copy_tokenizer(DataSection(tokenizer=f"{folder}/tokenizer.json"), folder, out) == both
    assert copy_tokenizer(DataSection(source=str(corpus)), folder, out) == both
    assert copy_tokenizer(DataSection(source=str(corpus)), None, out) == []


def test_weights_cut_short_stop_it_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = train(folder, tmp_path / "run")
    assert done.returncode == 2
    assert "damaged or cut short" in done.stderr
    assert not (tmp_path / "run").exists()
