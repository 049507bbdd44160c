"""The recipe as it is read: what nobody named, and what every host must see alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import write_json, write_yaml
from hetctl.trainer.model.config import config_of
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.recipe import load_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with a tokenizer of its own, and a tokenizer elsewhere."""
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "model" / "config.json", config_of(SHAPES["demo"], dtype="float32"))
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").touch()
    return tmp_path


def tokenizer(**settings: Any) -> str:
    keys = {"model": "model.name", "named": "data.tokenizer"}
    return load_recipe(None, [(keys[k], v) for k, v in settings.items()]).data.tokenizer


def test_a_model_folder_gives_its_tokenizer_where_nobody_named_one(folder: Path) -> None:
    assert tokenizer() == "bytes"
    assert tokenizer(model="model") == f"{folder}/model/tokenizer.json"
    assert tokenizer(model="model", named="bytes") == "bytes"
    assert tokenizer(model="model/config.json") == "bytes"
    (folder / "model" / "tokenizer.json").unlink()
    assert tokenizer(model="model") == "bytes"


@pytest.mark.parametrize("named", ["other", "other/tokenizer.json", "model/../other"])
def test_a_tokenizer_may_be_named_by_its_folder_and_has_a_whole_path(folder: Path, named: str) -> None:
    found = Path(tokenizer(model="model", named=named))
    assert found.is_absolute()
    assert found.samefile(folder / "other" / "tokenizer.json")


@pytest.mark.parametrize("source", ["corpus", "texts/../a.jsonl", "python-stdlib"])
def test_the_data_have_a_whole_path_as_ranks_run_elsewhere(folder: Path, source: str) -> None:
    found = load_recipe(None, [("data.source", source)]).data.source
    assert found == (source if source == "python-stdlib" else f"{folder}/{source}")


def test_a_folder_without_a_tokenizer_names_the_file_that_is_missing(folder: Path) -> None:
    (folder / "other" / "tokenizer.json").unlink()
    assert tokenizer(named="other") == f"{folder}/other/tokenizer.json"


def test_a_recorded_recipe_is_read_as_it_was_run(folder: Path) -> None:
    for named in ("bytes", "other"):
        run = load_recipe(None, [("model.name", "model"), ("data.tokenizer", named)])
        write_yaml(folder / "recipe.yaml", run)
        assert load_recipe(folder / "recipe.yaml") == run


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ("{rank: 0}", "lora.rank must be at least 1, found 0"),
        ("{rank: 4, alpha: 0}", "lora.alpha must be finite and positive, found 0"),
        (
            "{rank: 4, targets: [q_proj, query]}",
            "lora.targets names 'query', which is no linear layer of a block of demo",
        ),
        ("{rank: 4, targets: []}", "lora.targets names nothing in a block of demo"),
        ("{alpha: 4}", "lora has no rank, so nothing of it would be done"),
        ("{rank: 4, dropout: 1}", "lora.dropout must be in [0, 1), found 1"),
        ("{dora: true}", "lora has no rank, so nothing of it would be done"),
    ],
)
def test_adapters_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path, lora: str, sentence: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"lora: {lora}\n")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_recipe(path)


def test_adapters_of_a_rank_alone_are_of_all_linear_layers() -> None:
    adapters = load_recipe(None, [("lora.rank", 16)]).shape().adapters
    assert adapters is not None
    assert (adapters.rank, adapters.scale, len(adapters.targets)) == (16, 2.0, 7)
    assert load_recipe(None).shape().adapters is None
