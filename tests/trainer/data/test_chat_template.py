"""Chat templates: the tokens that transformers makes of a conversation, and loss on what the assistant says alone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.samples import Sample, samples
from hetctl.trainer.data.tokenizer import load_tokenizer
from tests.trainer.data.chats import BY_PREFIX, MARKED, TALKS, UNSTABLE, chat_file, section_of, tokenizer_folder

TOOLS = [{"type": "function", "function": {"name": "look <up>", "parameters": {"type": "object"}}}]


def sampled(tmp_path: Path, tokenizer: Path | None, rows: list[Any], **more: Any) -> list[Sample]:
    section = section_of(chat_file(tmp_path / "chats.jsonl", rows), tokenizer, **more)
    return list(samples(section, load_tokenizer(section)))


def of_transformers(folder: Path, talk: list[dict[str, Any]], **more: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True, **more)


@pytest.mark.parametrize("name", [*BY_PREFIX, *MARKED])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", (BY_PREFIX | MARKED)[name])
    for talk in TALKS:
        (found,) = sampled(tmp_path, folder, [{"messages": talk}])
        wanted = of_transformers(folder, talk, return_assistant_tokens_mask=name in MARKED)
        assert found.tokens.tolist() == wanted["input_ids"]
        if name in MARKED:
            assert found.bears_loss.tolist() == [bool(m) for m in wanted["assistant_masks"]]


@pytest.mark.parametrize("name", list(BY_PREFIX))
def test_what_bears_loss_is_what_a_plain_search_finds(name: str, tmp_path: Path) -> None:
    """Slow and plain: a token bears loss if its characters are in an answer, each sought from where the last ended."""
    folder = tokenizer_folder(tmp_path / "tokenizer", BY_PREFIX[name])
    for talk in TALKS:
        (found,) = sampled(tmp_path, folder, [{"messages": talk}])
        said, at = set[int](), 0
        for message in talk:
            answer = message["content"].strip()
            at = found.text.index(answer, at) + len(answer)
            if message["role"] == "assistant":
                said |= set(range(at - len(answer), at))
        for (first, past_last), bears in zip(found.places, found.bears_loss, strict=True):
            characters = set(range(first, past_last))
            if characters & said:
                assert bears, found.text[first:past_last]
            elif "<think>" in found.text and found.text.index("<think>") <= first < found.text.index("</think>") + 10:
                assert bears, "thoughts are the assistant's"
            elif bears:  # what else a turn adds: its end, and space around the answer
                assert {first - 1, past_last} & said or found.text[first:past_last].strip() in END_OF_TURN


END_OF_TURN = {"", "<|im_end|>", "<|eot|>", "</s>", "<end_turn>"}


def test_the_answers_of_a_marked_template_are_found_by_prefix_too(tmp_path: Path) -> None:
    marked = tokenizer_folder(tmp_path / "marked", MARKED["marked chatml"])
    plain = tokenizer_folder(tmp_path / "plain", BY_PREFIX["chatml"])
    for talk in TALKS:
        (a,), (b,) = (sampled(tmp_path, folder, [{"messages": talk}]) for folder in (marked, plain))
        assert a.text == b.text
        after = np.flatnonzero(a.bears_loss != b.bears_loss)
        assert {a.text[slice(*a.places[k])] for k in after} == {"\n"}, "the line's end, which the marks leave out"


def test_public_templates(tmp_path: Path) -> None:
    """All that TRL has: tokens as transformers makes them, loss as it is marked in TRL's versions for training."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    compared = 0
    for file in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")):
        folder = tokenizer_folder(tmp_path / file.stem, file.read_text())
        for talk in TALKS:
            marks = re.search(r"{%-?\s*generation", file.read_text()) is not None
            try:
                wanted = of_transformers(folder, talk, return_assistant_tokens_mask=marks)
                (found,) = sampled(tmp_path, folder, [{"messages": talk}])
            except (TemplateError, TypeError, ConfigError):  # not for such a conversation, or not to be told by prefix
                continue
            assert found.tokens.tolist() == wanted["input_ids"], file.stem
            assert not marks or found.bears_loss.tolist() == [bool(m) for m in wanted["assistant_masks"]], file.stem
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("in_config", [True, False])
def test_a_named_template_is_for_conversations_with_tools(in_config: bool, tmp_path: Path) -> None:
    named = {"default": BY_PREFIX["chatml"], "tool_use": BY_PREFIX["headers, tools and the day"]}
    folder = tokenizer_folder(tmp_path / "tokenizer", named, in_config=in_config)
    assert (folder / "chat_template.jinja").exists() is not in_config
    call = [{"function": {"name": "look <up>", "arguments": {"word": "日"}}}]
    talk = [TALKS[0][0], {"role": "assistant", "content": None, "tool_calls": call}]
    with_tools, plain = sampled(tmp_path, folder, [{"messages": talk, "tools": TOOLS}, {"messages": TALKS[0]}])
    assert with_tools.tokens.tolist() == of_transformers(folder, talk, tools=TOOLS)["input_ids"]
    assert "look <up>" in with_tools.text
    assert plain.tokens.tolist() == of_transformers(folder, TALKS[0])["input_ids"]


def test_a_template_that_is_no_prefix_of_itself_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", UNSTABLE)
    with pytest.raises(
        ConfigError, match=r"chats\.jsonl, line 2: what the assistant says cannot be found.* turn 2 "
    ) as e:
        sampled(tmp_path, folder, [{"messages": TALKS[0]}, {"messages": TALKS[0] * 2}])
    assert "{% generation %}" in e.value.hint


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (BY_PREFIX["instructions that alternate"], r"line 1: the chat template fails: roles must alternate"),
        ("{{ messages[0].content.nothing() }}", r"line 1: the chat template fails: .*nothing"),
        ("{% for m in messages %}", r"the chat template cannot be read: .*endfor"),
        ("{{ 'always the same' }}", r"line 1: the chat template renders nothing that the assistant says"),
        (None, r"tokenizer\.json has no chat template"),
        ("{{ messages.append(1) }}", r"line 1: the chat template fails: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"line 1: the chat template fails: .*unsafe"),
    ],
)
def test_templates_that_fail_say_where(template: str | None, words: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    talk = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ConfigError, match=words):
        sampled(tmp_path, folder, [{"messages": talk}])


def test_a_recipe_names_another_template(tmp_path: Path) -> None:
    folder, mine = tokenizer_folder(tmp_path / "tokenizer", "{{ raise_exception('no') }}"), tmp_path / "mine.jinja"
    mine.write_text(BY_PREFIX["plain words"])
    (found,) = sampled(tmp_path, folder, [{"messages": TALKS[0]}], template=str(mine))
    assert found.text == "USER: Is the sky blue? ASSISTANT: Yes.</s>"
    (found,) = sampled(tmp_path, None, [{"messages": TALKS[1]}], template="chatml")
    assert bytes(found.tokens.astype(np.uint8)).decode() == found.text
    assert bytes(found.tokens[found.bears_loss].astype(np.uint8)).decode() == " Yes \n<|im_end|>日, it is<|im_end|>"
