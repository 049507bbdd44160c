"""Preference pairs: the shapes of their rows, how they lie in samples, and which rows and recipes are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.conversations import conversations
from hetctl.trainer.data.datasets import IGNORED, Sides, fitted, open_sides
from hetctl.trainer.data.sources import check_pairs, is_chat, is_pairs
from hetctl.trainer.recipe import PAIRS, DataSection, SourceSection, load_recipe
from tests.trainer.data.chats import chat_file
from tests.trainer.data.test_datasets import write_table

ASKED, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Sky?"), ("assistant", "Blue."), ("assistant", "No."))
)
SYSTEM = {"role": "system", "content": "Be short."}
SHAPES: list[dict[str, Any]] = [
    {"prompt": "Sky?", "chosen": "Blue.", "rejected": "No."},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "Sky?", "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "Sky?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
]


def section(path: Path, **more: Any) -> DataSection:
    return DataSection(str(path), template="chatml", **more)


def opened(data: DataSection, tmp_path: Path, seq_len: int) -> Sides:
    return open_sides(data, seq_len=seq_len, global_batch=4, vocabulary=257, cache=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("row", SHAPES)
def test_all_shapes_in_all_files_are_the_same_pair(row: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        chat_file(path, [row])
    else:
        write_table(path, [row])
    chosen, rejected = conversations(section(path))
    assert (chosen.messages, rejected.messages) == ((ASKED, GOOD), (ASKED, BAD))
    assert (chosen.begin, rejected.begin, chosen.name) == (1, 1, rejected.name)
    assert (chosen.side, rejected.side) == ("chosen", "rejected")


def test_turns_before_the_answers_bear_no_loss_and_a_system_may_stand_apart(tmp_path: Path) -> None:
    said = [ASKED, GOOD, {"role": "user", "content": "Grass?"}]
    rows = [
        {"chosen": [*said, GOOD], "rejected": [*said, BAD]},
        {"system": "Be short.", "prompt": "Sky?", "chosen": "Blue.", "rejected": "No."},
    ]
    first, _, apart, _ = conversations(section(chat_file(tmp_path / "rows.jsonl", rows)))
    assert first.begin == 3
    assert apart.messages == (SYSTEM, ASKED, GOOD)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Sky?", "chosen": "Blue."}, "no preference pair"),
        ({"prompt": "Sky?", "chosen": "Blue.", "rejected": None}, "no preference pair"),
        ({"prompt": "Sky?", "chosen": "Blue.", "rejected": 3}, "no preference pair"),
        ({"prompt": "Sky?", "chosen": [], "rejected": []}, "no preference pair"),
        ({"prompt": 3, "chosen": "Blue.", "rejected": "No."}, "no preference pair"),
        ({"chosen": "Blue.", "rejected": "No."}, "no two answers to one prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no two answers to one prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [SYSTEM, BAD]}, "no two answers to one prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, ASKED]}, "no two answers to one prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "no two answers to one prompt"),
        ({"prompt": "Grass?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "another prompt than the row"),
        (["Blue.", "No."], "no JSON object"),
    ],
)
def test_rows_that_are_no_pair_are_named(row: Any, words: str, tmp_path: Path) -> None:
    path = chat_file(tmp_path / "rows.jsonl", [SHAPES[0], row])
    with pytest.raises(ConfigError, match=f"line 2: .*{words}"):
        list(conversations(section(path)))


def pairs(tmp_path: Path, count: int = 40, longest: int = 30) -> DataSection:
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        chosen, rejected = ("ab"[n] * int(random.integers(1, longest)) for n in (0, 1))
        rows.append({"prompt": f"{number:02}?", "chosen": chosen, "rejected": rejected})
    return section(chat_file(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize("packing", [True, False])
def test_both_of_a_pair_lie_in_one_row_as_documents_of_their_own(packing: bool, tmp_path: Path) -> None:
    sides = opened(replace(pairs(tmp_path), packing=packing), tmp_path, seq_len=400)
    seen = []
    for dataset in (sides.training, sides.validation):
        for step in range(-(-dataset.rows // 4)):  # type: ignore[attr-defined]
            for row, target, documents in zip(*dataset.batch(step, 0, 4), strict=True):
                assert documents.max() % 2 == 0
                assert packing or documents.max() == 2
                for number in range(1, documents.max() + 1):
                    text = bytes(row[documents == number].tolist()).decode()
                    answer = "ab"[(number - 1) % 2]
                    assert text.endswith(
                        f"assistant\n{answer * text.rstrip().count(answer, text.index('assistant') + 9)}<|im_end|>"
                    )
                    seen.append((text[text.index("user\n") + 5 :][:2], answer))
                    learnt = [t for t in target[documents == number].tolist() if t != IGNORED]
                    assert set(bytes(learnt).decode()) <= {answer, *"<|im_end|>"}
                assert (target[documents == 0] == IGNORED).all()
    assert set(seen) == {(f"{n:02}", answer) for n in range(40) for answer in "ab"}
    (_, training, _), counts = sides.talks[0], [side.counts() for side in sides.talks[0][1:]]
    assert sum(found["pairs"] for found in counts) == 40
    assert training.said.endswith(f"in {training.rows} samples" if training.rows > 1 else "in 1 sample")
    assert " pairs in " in training.said


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1), st.integers(2, 60))
def test_of_a_pair_that_is_too_long_each_has_half_or_what_the_other_leaves(lengths: Any, room: int) -> None:
    for (a, b), (kept_a, kept_b) in zip(lengths, fitted(np.asarray(lengths), room).tolist(), strict=True):
        assert (kept_a, kept_b) == (a, b) or kept_a + kept_b == room
        assert kept_a == a or kept_a >= room // 2
        assert kept_b == b or kept_b >= room // 2


@pytest.mark.parametrize("long", ["cut", "drop"])
def test_pairs_that_are_too_long_are_cut_or_dropped_aloud(long: Any, tmp_path: Path) -> None:
    data = replace(pairs(tmp_path, longest=90), long=long)
    training = opened(data, tmp_path, seq_len=230).talks[0][1]
    assert (training.cut if long == "cut" else len(training.dropped)) > 3
    assert f"{training.cut} cut, {len(training.dropped)} dropped" in training.said
    with pytest.raises(ConfigError, match=r"\d+ pairs of .* are of more than 230 tokens"):
        opened(replace(data, long="error"), tmp_path, seq_len=230)
    with pytest.raises(ConfigError, match=r"no pair of .* bears loss within 40 tokens"):
        opened(data, tmp_path, seq_len=40)  # the prompt alone is as long as half of that


def test_a_few_pairs_hold_out_a_whole_one(tmp_path: Path) -> None:
    sides = opened(replace(pairs(tmp_path, 2), validation_share=1e-9), tmp_path, seq_len=200)
    assert [side.counts()["pairs"] for side in sides.talks[0][1:]] == [1, 1]
    with pytest.raises(ConfigError, match="holds one pair: there is none to validate on"):
        opened(pairs(tmp_path, 1), tmp_path, seq_len=200)


def test_what_rows_with_more_keys_are_follows_from_what_is_trained(tmp_path: Path) -> None:
    row = {"messages": [ASKED, GOOD], "text": "Sky", **SHAPES[3]}
    path = chat_file(tmp_path / "rows.jsonl", [row] * 9)
    texts, chats, both = (section(path, field=f) for f in ("text", "messages", PAIRS))
    assert [is_chat(data) for data in (texts, chats, both)] == [False, True, True]
    assert [is_pairs(data) for data in (texts, chats, both)] == [False, False, True]
    lora = [("lora.rank", 2), ("data.source", str(path)), ("data.template", "chatml")]
    asked = load_recipe(None, [*lora, ("dpo.beta", 0.1)])
    check_pairs(asked.data, wanted=True)
    assert len(list(conversations(asked.data))) == 18
    check_pairs(load_recipe(None, lora).data, wanted=False)


def test_a_recipe_and_its_data_agree_on_pairs(tmp_path: Path) -> None:
    good = chat_file(tmp_path / "pairs.jsonl", [SHAPES[0]])
    chat = chat_file(tmp_path / "chats.jsonl", [{"messages": [ASKED, GOOD]}])
    with pytest.raises(ConfigError, match="holds preference pairs, and nothing says to train on them"):
        check_pairs(section(good), wanted=False)
    for wrong in (chat, "python-stdlib"):
        with pytest.raises(ConfigError, match="dpo trains on preference pairs"):
            check_pairs(DataSection(str(wrong), field=PAIRS), wanted=True)
    mixed = DataSection(sources=(SourceSection(str(good)), SourceSection(str(chat))), field=PAIRS)
    with pytest.raises(ConfigError, match=r"chats\.jsonl' are none"):
        check_pairs(mixed, wanted=True)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([("dpo.beta", 0.1)], "dpo compares adapters with the model without them"),
        ([("dpo.beta", 0), ("lora.rank", 4)], r"dpo\.beta must be finite and positive"),
        ([("dpo.beta", float("inf")), ("lora.rank", 4)], r"dpo\.beta must be finite and positive"),
        ([("dpo.beat", 0.1), ("lora.rank", 4)], "beta"),
    ],
)
def test_recipes_that_cannot_be_are_refused(overrides: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(None, overrides)
    assert re.search(words, f"{refusal.value} {refusal.value.hint}")
