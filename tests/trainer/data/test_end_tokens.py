"""What ends a continuation: the tokens that transformers ends at, and those that close an assistant's turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.chat_template import find_template
from hetctl.trainer.data.end_tokens import end_tokens, holds_chats
from hetctl.trainer.data.tokenizer import load_tokenizer
from hetctl.trainer.recipe import DataSection, SourceSection
from tests.trainer.data.chats import BY_PREFIX, MARKED, chat_file, section_of, tokenizer_folder

CLOSED_BY = {
    "chatml": "<|im_end|>",
    "headers": "<|eot|>",
    "instructions": "</s>",
    "turns of a model": "<end_turn>",
    "words and an end": "<|im_end|>",
    "plain words": "</s>",
    "thoughts of the last turn": "<|im_end|>",
    "marked chatml": "<|im_end|>",
}


def ends(folder: Path, *, chat: bool, **more: Any) -> set[str]:
    """The words that end a continuation by the tokenizer of a folder."""
    from tokenizers import Tokenizer

    section = section_of(folder / "none.jsonl", folder, **more)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {whole.id_to_token(token) for token in end_tokens(section, load_tokenizer(section), chat=chat)}


@pytest.mark.parametrize("name", list(CLOSED_BY))
def test_an_answer_ends_with_what_the_template_puts_behind_it(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, (BY_PREFIX | MARKED)[name])
    assert ends(folder, chat=True) == {"</s>", CLOSED_BY[name]}
    assert ends(folder, chat=False) == {"</s>"}


@pytest.mark.parametrize("name", list(BY_PREFIX))
def test_a_question_is_asked_as_transformers_asks_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path, BY_PREFIX[name])
    talk = [{"role": "user", "content": "Is the sky blue?"}]
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert find_template(section_of(folder, folder)).asked("Is the sky blue?") == wanted


@pytest.mark.parametrize("said", [4, [4, 3]])
def test_the_ends_that_a_models_settings_name_are_those_of_transformers(said: int | list[int], tmp_path: Path) -> None:
    from transformers import GenerationConfig

    folder = tokenizer_folder(tmp_path, None)
    config = {"eos_token_id": 5, "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    assert ends(folder, chat=False) == {"</s>", "<|head|>"}
    GenerationConfig(eos_token_id=said).save_pretrained(folder)
    assert ends(folder, chat=False) == {"</s>", "<|eot|>"} | ({"<|im_end|>"} if isinstance(said, list) else set())


def test_settings_that_name_no_token(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, None)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["end"]}')
    with pytest.raises(ConfigError, match="eos_token_id is no token"):
        ends(folder, chat=False)


def test_bytes_end_with_their_text_alone(tmp_path: Path) -> None:
    section = DataSection(source=str(tmp_path), template="chatml")
    assert end_tokens(section, load_tokenizer(section), chat=True) == {256}, "they spell <|im_end|>"


def test_whether_there_are_conversations_among_the_sources(tmp_path: Path) -> None:
    talks = chat_file(tmp_path / "chats.jsonl", [{"prompt": "a", "completion": "b"}])
    text = chat_file(tmp_path / "text.txt", ["words"])
    assert holds_chats(section_of(talks))
    assert not holds_chats(section_of(text))
    assert holds_chats(DataSection(sources=(SourceSection(str(text)), SourceSection(str(talks)))))
