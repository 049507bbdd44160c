"""Conversations become samples: each in a row of its own or packed, cut or dropped aloud, mixed by weight."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.conversations import conversations
from hetctl.trainer.data.datasets import BLOCK, IGNORED, Mixed, Sides, open_sides, packed
from hetctl.trainer.data.samples import samples
from hetctl.trainer.data.sources import fingerprint, held_out, is_chat
from hetctl.trainer.data.tokenizer import load_tokenizer
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.recipe import DataSection, SourceSection, load_recipe
from tests.trainer.data.chats import BY_PREFIX, TALKS, chat_file, section_of, tokenizer_folder

LONG = 90  # positions: some of the conversations below are longer


def talk(number: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "y" * (number % 60 + 1)}]
    return {"messages": said}


def opened(section: DataSection, tmp_path: Path, seq_len: int = LONG, global_batch: int = 8) -> Sides:
    return open_sides(section, seq_len=seq_len, global_batch=global_batch, vocabulary=700, cache=tmp_path / "cache")


@pytest.fixture
def chats(tmp_path: Path) -> DataSection:
    rows = [talk(number) for number in range(120)]
    return section_of(chat_file(tmp_path / "chats.jsonl", rows), template="chatml", validation_share=0.3)


def rows_of(dataset: Any, count: int) -> list[tuple[np.ndarray, ...]]:
    return list(zip(*dataset.batch(0, 0, count), strict=True))


def test_a_row_is_one_conversation_and_its_targets_are_what_the_assistant_says(
    chats: DataSection, tmp_path: Path
) -> None:
    """The slow way: each sample tokenised anew, its targets one by one."""
    wanted = {}
    for one in samples(chats, load_tokenizer(chats)):
        inputs, targets = [0] * LONG, [IGNORED] * LONG
        for at in range(min(LONG, len(one.tokens) - 1)):
            inputs[at] = int(one.tokens[at])
            if one.bears_loss[at + 1]:
                targets[at] = int(one.tokens[at + 1])
        wanted[tuple(inputs)] = targets
    sides = opened(chats, tmp_path)
    rows = [(i, t) for side in (sides.training, sides.validation) for i, t in rows_of(side, side.rows)]  # type: ignore[attr-defined]
    assert len(rows) == len(wanted) == 120
    for inputs, targets in rows:
        assert wanted[tuple(inputs.tolist())] == targets.tolist()
    assert 0 < sides.validation.rows < 60  # type: ignore[attr-defined]


@pytest.mark.parametrize("long", ["cut", "drop"])
def test_long_conversations_are_cut_or_dropped_aloud(long: Any, chats: DataSection, tmp_path: Path) -> None:
    lengths = [len(one.tokens) for one in samples(chats, load_tokenizer(chats)) if not held_out(one.name, chats)]
    count = sum(length > LONG + 1 for length in lengths)
    sides = opened(replace(chats, long=long), tmp_path)
    kept, cut, dropped = (len(lengths), count, 0) if long == "cut" else (len(lengths) - count, 0, count)
    assert (
        f"train on {kept} conversations in {kept} samples (of more than 90 tokens: {cut} cut, {dropped}"
        in sides.said[0]
    )
    assert sides.training.rows == kept  # type: ignore[attr-defined]


def test_long_conversations_are_refused_where_asked(chats: DataSection, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\d\d conversations of '.*chats\.jsonl' are of more than 90 tokens"):
        opened(replace(chats, long="error"), tmp_path)


def test_what_is_cut_before_the_answer_is_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 500, "completion": "y"}, *(talk(n) for n in range(20))]
    section = section_of(chat_file(tmp_path / "chats.jsonl", rows), template="chatml")
    assert "1 dropped" in opened(section, tmp_path).said[0]
    with pytest.raises(ConfigError, match=r"no conversation of .* bears loss within 5 tokens"):
        opened(section, tmp_path, seq_len=5)


def test_packed_rows_hold_every_conversation_once_and_say_where_each_is(chats: DataSection, tmp_path: Path) -> None:
    def pieces(side: Any) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for inputs, targets, *documents in rows_of(side, side.rows):
            marks = documents[0] if documents else (inputs != 0).astype(int)
            assert not (np.diff(np.where(marks == 0, 1 << 30, marks)) < 0).any(), "one after the other"
            assert (targets[marks == 0] == IGNORED).all()
            for number in set(marks.tolist()) - {0}:
                found[(*inputs[marks == number].tolist(), *targets[marks == number].tolist())] += 1
        return found

    alone, together = (opened(c, tmp_path, 200) for c in (chats, replace(chats, packing=True)))
    for one, several in ((alone.training, together.training), (alone.validation, together.validation)):
        assert pieces(one) == pieces(several)
        assert several.rows < one.rows  # type: ignore[attr-defined]
    assert alone.digest == together.digest, "the tokens are the same ones"


@given(st.lists(st.integers(1, 50), min_size=1), st.data())
def test_packing_loses_nothing_and_overfills_nothing(lengths: list[int], data: st.DataObject) -> None:
    kept = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    rows = packed(np.asarray(lengths), kept, 50)
    assert sorted(number for row in rows for number in row) == kept.tolist()
    fill = [sum(lengths[number] for number in row) for row in rows]
    assert max(fill) <= 50
    assert sum(f <= 25 for f in fill) <= 1, "two halves would have shared a row"


class Numbers:
    """A source whose sample k is k, once for each step."""

    def __init__(self, first: int) -> None:
        self.first = first

    def batch(self, step: int, first: int, past_last: int) -> tuple[np.ndarray, ...]:
        return (np.asarray([[self.first + step]]),)


def test_a_mixture_has_each_source_by_its_weight_and_each_sample_in_turn() -> None:
    mixed = Mixed([Numbers(0), Numbers(10**6)], [3.0, 1.0], global_batch=BLOCK // 4, seed=1)
    steps = [mixed.batch(step, 0, BLOCK // 4)[0][:, 0] for step in range(8)]
    every = np.concatenate(steps)
    assert sorted(every[every < 10**6]) == list(range(BLOCK * 3 // 2))
    assert sorted(every[every >= 10**6] - 10**6) == list(range(BLOCK // 2))
    assert np.count_nonzero(every[: BLOCK // 10] < 10**6) != BLOCK // 10, "they come mixed"
    for step in (5, 2):  # whoever asks for which part
        parts = [mixed.batch(step, a, b)[0][:, 0] for a, b in ((0, 3), (3, 100), (100, 250))]
        assert (np.concatenate(parts) == steps[step]).all()
    with pytest.raises(ConfigError, match="less than 1/1000"):
        Mixed([Numbers(0), Numbers(1)], [1.0, 1e-6], global_batch=1, seed=0)


def test_text_and_conversations_mix(chats: DataSection, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("z" * 5000)
    sources = (SourceSection(str(tmp_path / "text.txt"), 1.0), SourceSection(chats.source, 4.0))
    for packing in (False, True):
        section = DataSection(sources=sources, template="chatml", validation_share=0.3, packing=packing)
        arrays = opened(section, tmp_path).training.batch(0, 0, 100)
        assert len(arrays) == 2 + packing
        of_text = (arrays[0] == ord("z")).all(axis=1)
        assert 10 < np.count_nonzero(of_text) < 30


def test_recipes_name_sources_one_way(tmp_path: Path) -> None:
    both = [("data.sources", [{"source": "a.jsonl", "weight": 2}, {"source": "b.jsonl"}])]
    recipe = load_recipe(None, both)
    assert [s.source for s in recipe.data.sources] == [str(Path(n).absolute()) for n in ("a.jsonl", "b.jsonl")]
    moved = recipe.with_paths({recipe.data.sources[0].source: "/there"})
    assert [s.source for s in moved.data.sources] == ["/there", recipe.data.sources[1].source]
    with pytest.raises(ConfigError, match=r"data\.source and data\.sources both"):
        load_recipe(None, [*both, ("data.source", "c.jsonl")])
    with pytest.raises(ConfigError, match=r"data\.sources\[0\]\.weight must be finite and positive"):
        load_recipe(None, [("data.sources", [{"source": "a", "weight": 0}])])


def test_keys_of_conversations_leave_the_tokens_of_texts_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    plain = DataSection(source=str(tmp_path / "a.txt"))
    others = DataSection(plain.source, ship=True, template="chatml", long="drop", packing=True)
    assert repr(plain) == (
        f"DataSection(source='{plain.source}', tokenizer='bytes', field='text', validation_share=0.05, seed=0)"
    ), "it names what is kept in caches"
    assert fingerprint(plain) == fingerprint(others)


def test_a_changed_template_makes_other_tokens(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", BY_PREFIX["chatml"])
    rows = [{"messages": TALKS[0]}] * 30
    section = section_of(chat_file(tmp_path / "chats.jsonl", rows), folder)
    first = open_tokens(section, tmp_path / "cache").digest
    (folder / "chat_template.jinja").write_text(BY_PREFIX["plain words"])
    assert open_tokens(section, tmp_path / "cache").digest != first


SHAPES = (
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("row", SHAPES)
def test_all_shapes_in_all_files_are_the_same_conversation(row: dict[str, Any], kind: str, tmp_path: Path) -> None:
    rows = [row | {"more": 1}] * 3
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        chat_file(path, rows)
    else:
        write_table(path, rows)
    section = DataSection(source=str(path))
    assert is_chat(section)
    assert [(t.name, t.messages) for t in conversations(section)] == [
        (f"data.{kind}#{n}", tuple(SHAPES[0]["messages"])) for n in (1, 2, 3)
    ]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """As a parquet file, or as `datasets` saves to a disk."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def test_a_saved_dataset_is_read_without_what_the_library_caches(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    rows = [talk(n) | {"tools": None} for n in range(4)]
    rows[0]["messages"][0]["name"] = "me"
    write_table(folder / "data-00000-of-00001.arrow", rows)
    write_table(folder / "cache-1234.arrow", rows)
    (folder / "state.json").write_text("{}")
    (folder / "README.md").write_text("what it is")
    found = list(conversations(DataSection(source=str(folder))))
    assert len(found) == 4
    assert found[0].messages[0] == {"role": "user", "content": "0?", "name": "me"}
    assert found[1].messages[0] == {"role": "user", "content": "1?"}, "others did not say a name"


def test_a_prompt_of_several_turns_bears_no_loss(tmp_path: Path) -> None:
    row = {"prompt": TALKS[1][1:4], "completion": [{"role": "assistant", "content": "No"}]}
    path = chat_file(tmp_path / "a.jsonl", [row])
    plain = tmp_path / "plain.jinja"
    plain.write_text(BY_PREFIX["chatml"])
    for template in ("chatml", str(plain)):
        (found,) = samples(section_of(path, template=template), load_tokenizer(section_of(path)))
        assert bytes(found.tokens[found.bears_loss].astype(np.uint8)).strip() == b"No<|im_end|>"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([talk(1), "", talk(2)], r"chats\.jsonl, line 2: empty"),
        ([talk(1), json.dumps(talk(2))[:-9]], r"chats\.jsonl, line 2: no JSON object \(a line that was cut short\?\)"),
        (
            [talk(1), {"messages": [{"role": "user", "content": "a"}]}],
            r"chats\.jsonl, line 2: the assistant says nothing",
        ),
        ([talk(1), {"messages": []}], r"chats\.jsonl, line 2: the assistant says nothing"),
        ([talk(1), {"messages": "hello"}], r"chats\.jsonl, line 2: no conversation"),
        ([talk(1), {"messages": [{"content": "a"}]}], r"chats\.jsonl, line 2: no conversation"),
        ([talk(1), {"other": 1}], r"chats\.jsonl, line 2: no conversation"),
        ([talk(1) | {"tools": "{"}], r"chats\.jsonl, line 1: no conversation"),
        ([{"conversations": [{"from": "human", "value": "a"}]}], r"line 1: the assistant says nothing"),
        ([talk(1)], r"chats\.jsonl' holds one conversation: there is none to validate on"),
    ],
)
def test_rows_that_are_no_conversation_are_named(lines: list[Any], words: str, tmp_path: Path) -> None:
    section = section_of(chat_file(tmp_path / "chats.jsonl", lines), template="chatml")
    with pytest.raises(ConfigError, match=words):
        open_tokens(section, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/")), "nothing is left of it"


def test_a_few_conversations_hold_out_the_last(tmp_path: Path) -> None:
    section = section_of(chat_file(tmp_path / "a.jsonl", [talk(n) for n in (1, 2)]), template="chatml", seed=4)
    tokens = open_tokens(section, tmp_path / "cache")
    assert tokens.ends is not None
    assert [ends.tolist() for ends in tokens.ends] == [[len(tokens.train)], [len(tokens.validation)]]


@pytest.mark.parametrize(
    ("row", "field", "chat"),
    [
        ({"text": "a", "messages": []}, "text", False),
        ({"text": "a", "messages": []}, "messages", True),
        ({"prompt": "a", "completion": "b"}, "prompt", False),
        ({"prompt": "a"}, "text", False),
    ],
)
def test_rows_with_the_field_of_texts_are_texts(row: dict[str, Any], field: str, chat: bool, tmp_path: Path) -> None:
    assert is_chat(DataSection(source=str(chat_file(tmp_path / "a.jsonl", [row])), field=field)) is chat
