"""Data: real files to tokens to samples, held-out ones apart, the same whatever asks for them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.datasets import PackedTokens, open_sides
from hetctl.trainer.data.sources import documents, held_out, source_files
from hetctl.trainer.data.tokenizer import load_tokenizer
from hetctl.trainer.data.tokens import BOUND, open_tokens
from hetctl.trainer.recipe import DataSection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02d}.txt").write_text(f"text number {number} " * 5)
    return texts


def test_the_standard_library_is_there_and_has_no_tests_in_it() -> None:
    files = source_files(DataSection())
    assert len(files) > 100
    assert not [f for f in files if "test" in f.parts or "site-packages" in f.parts]


def test_documents_are_held_out_whole_and_for_ever(folder: Path, tmp_path: Path) -> None:
    section = DataSection(source=str(folder), validation_share=0.25)
    names = [d.name for d in documents(section)]
    sides = {n: held_out(n, section) for n in names}
    assert 0 < sum(sides.values()) < len(names)
    tokens = open_tokens(section, tmp_path / "cache")
    held = bytes(int(t) for t in tokens.validation if t < 256).decode()
    assert all((f"text number {int(n[:2])} " in held) == side for n, side in sides.items())
    assert np.count_nonzero(tokens.train == 256) == len(names) - sum(sides.values())


def test_one_text_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 900 + "b" * 100)
    tokens = open_tokens(DataSection(source=str(tmp_path / "one.txt"), validation_share=0.1), tmp_path / "cache")
    assert len(tokens.train) + len(tokens.validation) == 1001
    assert set(tokens.validation[:-1]) == {ord("b")}


def test_a_changed_text_is_tokenised_anew(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    section = DataSection(source=str(path), validation_share=0.5)
    path.write_text("first")
    first = open_tokens(section, tmp_path / "cache").train.copy()
    path.write_text("second text")
    assert len(open_tokens(section, tmp_path / "cache").train) > len(first)


def test_jsonl_and_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "[UNK]": 1, "hello": 2, "world": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"body": "hello world hello"}) for _ in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    section = DataSection(
        source=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer.json"), field="body", validation_share=0.3
    )
    tokens = open_tokens(section, tmp_path / "cache")
    assert tokens.vocabulary == 4
    assert tokens.train[:4].tolist() == [2, 3, 2, 0]
    assert len(tokens.train) + len(tokens.validation) == 80


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    section = DataSection(source=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="not a Hugging Face tokenizer"):
        open_tokens(section, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/"))


def tokenizer_file(folder: Path, *, unknown: str | None = "[UNK]", drops: bool = False) -> str:
    """A tokenizer of one word, or of none: a BPE without an unknown token drops what it does not know."""
    from tokenizers import Tokenizer, models

    words = {"<|endoftext|>": 0, "[UNK]": 1, "hello": 2}
    model = models.BPE({"<|endoftext|>": 0}, []) if drops else models.WordLevel(words, unk_token=unknown)
    Tokenizer(model).save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_half_a_character_is_no_obstacle_to_either_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800 half"}\n' * 3)
    for tokenizer in ("bytes", tokenizer_file(tmp_path)):
        tokens = open_tokens(DataSection(str(tmp_path / "a.jsonl"), tokenizer), tmp_path / "cache")
        assert len(tokens.train) > 1


@pytest.mark.parametrize(
    ("text", "made", "words"),
    [
        ('{"text": "other"}', {"unknown": "[NONE]"}, r"tokenizer\.json cannot encode the text: .*UNK"),
        ('{"text": "other"}\n' * 9, {"drops": True}, r"a\.jsonl' holds no text"),
        ('{"text": ""}', None, r"a\.jsonl' holds no text"),
        (b'{"text": "fine"}\n{"text": "\xff"}', None, r"a\.jsonl, line 2: not UTF-8"),
        (b'\xff\xfe{\x00"\x00', None, r"a\.jsonl, line 1: not UTF-8"),
    ],
)
def test_lines_that_give_no_tokens_are_refused(
    text: str | bytes, made: dict[str, Any] | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    tokenizer = "bytes" if made is None else tokenizer_file(tmp_path, **made)
    with pytest.raises(ConfigError, match=words):
        open_tokens(DataSection(str(tmp_path / "a.jsonl"), tokenizer), tmp_path / "cache")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n', encoding="utf-8-sig")
    assert [d.text for d in documents(DataSection(str(tmp_path / "a.jsonl")))] == ["one"]


@pytest.mark.parametrize("share", [1e-18, 1 - 1e-16])
def test_any_share_leaves_tokens_on_both_sides(share: float, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    write_megatron(tmp_path / "corpus", [[1, 2, 3]], np.uint16, 8)
    for source in ("a.txt", "corpus"):
        tokens = open_tokens(DataSection(str(tmp_path / source), validation_share=share), tmp_path / "cache")
        assert min(len(tokens.train), len(tokens.validation)) == 1


def test_a_file_s_name_need_not_be_utf_8(folder: Path, tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("text")
    assert np.count_nonzero(open_tokens(DataSection(str(folder)), tmp_path / "cache").train == 256) > 20


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*a\.txt/hetctl/tokens") as caught:
        open_tokens(DataSection(str(tmp_path / "a.txt")))
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "read_text", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: Permission denied"):
        open_tokens(DataSection(str(tmp_path / "a.txt")), tmp_path / "cache")


def raising(error: OSError) -> Callable[..., str]:
    def fail(*_: object, **__: object) -> str:
        raise error

    return fail


@pytest.mark.parametrize("named", ["<end>", {"content": "<end>", "lstrip": False}, None, ["<end>"]])
def test_an_unusual_end_of_text_is_the_one_that_the_tokenizer_s_settings_name(tmp_path: Path, named: object) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"[UNK]": 0, "<end>": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    section = DataSection(tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(section)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    if named in (None, ["<end>"]):
        with pytest.raises(ConfigError, match="no end-of-text token"):
            load_tokenizer(section)
    else:
        assert load_tokenizer(section).end == 1


def test_tokens_are_bounded_by_the_largest_id_and_old_caches_made_anew(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "[UNK]": 70, "far": 5000}, unk_token="[UNK]"))
    tokenizer.add_tokens(["further"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("far further " * 20)
    section = DataSection(source=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    assert open_tokens(section, tmp_path / "cache").vocabulary == largest + 1 > 5000
    (kept,) = (tmp_path / "cache").glob("*/tokens.json")
    old = {key: value for key, value in json.loads(kept.read_text()).items() if key != BOUND}
    for older in ({"vocabulary": 4, **old}, {**old, BOUND: 4, "validation": 0}):
        kept.write_text(json.dumps(older))
        assert open_tokens(section, tmp_path / "cache").vocabulary == largest + 1


def write_megatron(stem: Path, documents: list[list[int]], dtype: type, code: int) -> None:
    """The format as its own builder writes it: one sequence per document."""
    sizes = np.asarray([len(d) for d in documents], dtype=np.int32)
    flat = np.concatenate([np.asarray(d, dtype=dtype) for d in documents])
    stem.with_suffix(".bin").write_bytes(flat.tobytes())
    offsets = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64) * flat.itemsize)).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1, dtype=np.int64)
    stem.with_suffix(".idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + bounds.tobytes())


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_files_are_mapped_and_held_out_by_documents(
    tmp_path: Path, dtype: type, code: int, ending: str
) -> None:
    documents = [[n, 100 + n, 999] for n in range(20)]
    write_megatron(tmp_path / "corpus", documents, dtype, code)
    section = DataSection(source=str(tmp_path / f"corpus{ending}"), validation_share=0.25)
    assert len(source_files(section)) == 2
    tokens = open_tokens(section, tmp_path / "cache")
    assert tokens.vocabulary == 1000
    assert tokens.train.tolist() == [t for d in documents[:15] for t in d]
    assert tokens.validation.tolist() == [t for d in documents[15:] for t in d]
    inputs, targets = PackedTokens(tokens.train, seq_len=8, global_batch=2, seed=0).batch(0, 0, 2)
    assert inputs.dtype == targets.dtype == np.int64


def test_a_name_that_leaves_no_room_for_an_ending_is_absent_like_any_other() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        source_files(DataSection("x" * 253))


def test_negative_tokens_are_refused_by_the_name_of_their_file(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", [[1, 2], [3, -7]], np.int32, 4)
    with pytest.raises(ConfigError, match=r"corpus\.bin holds the negative token -7"):
        open_tokens(DataSection(source=str(tmp_path / "corpus")), tmp_path / "cache")


def test_megatron_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", [[1, 2], [3]], np.uint16, 8)
    section = DataSection(source=str(tmp_path / "corpus.bin"))
    (tmp_path / "corpus.bin").write_bytes(b"\x00" * 4)
    with pytest.raises(ConfigError, match="cut short"):
        open_tokens(section, tmp_path / "cache")
    (tmp_path / "corpus.idx").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no index"):
        open_tokens(section, tmp_path / "cache")
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        open_tokens(section, tmp_path / "cache")


@pytest.mark.parametrize(
    ("place", "count", "words"),
    [
        (18, 2**62, r"too short for its 4611686018427387904 sequences and 3 documents"),
        (18, 2**64 - 1, r"too short for its 18446744073709551615 sequences"),
        (26, 2**63, r"too short for its 2 sequences and 9223372036854775808 documents"),
        (34, 4 << 32 | 0xFFFFFFFF, r"has a sequence of -1 tokens"),
        (-16, 9, r"documents that are not made of its 2 sequences"),
        (-8, 9, r"documents that are not made of its 2 sequences"),
        (-24, 2**64 - 1, r"documents that are not made of its 2 sequences"),
    ],
)
def test_an_index_that_cannot_be_is_refused(place: int, count: int, words: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", [[1, 2], [3]], np.uint16, 8)
    index = bytearray((tmp_path / "corpus.idx").read_bytes())
    struct.pack_into("<Q", index, place % len(index), count)
    (tmp_path / "corpus.idx").write_bytes(index)
    with pytest.raises(ConfigError, match=words):
        open_tokens(DataSection(str(tmp_path / "corpus")), tmp_path / "cache")


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": [f"row {n}" for n in range(30)]}), tmp_path / "a.parquet")
    section = DataSection(source=str(tmp_path / "a.parquet"), field="body", validation_share=0.3)
    assert [d.text for d in documents(section)] == [f"row {n}" for n in range(30)]
    with pytest.raises(ConfigError, match="has no column 'text'") as caught:
        list(documents(DataSection(source=str(tmp_path / "a.parquet"))))
    assert caught.value.hint == "set data.field to one of: body"


def test_an_epoch_shows_every_window_once_and_any_share_is_the_same() -> None:
    tokens = np.arange(1001, dtype=np.uint32)
    data = PackedTokens(tokens, seq_len=10, global_batch=20, seed=3)
    seen = []
    for step in range(5):
        inputs, targets = data.batch(step, 0, 20)
        assert (targets == inputs + 1).all()
        seen += inputs[:, 0].tolist()
        parts = np.concatenate([data.batch(step, a, b)[0] for a, b in ((0, 7), (7, 8), (8, 20))])
        assert (parts == inputs).all()
    assert sorted(seen) == list(range(0, 1000, 10))
    again = [data.batch(step, 0, 20)[0][0, 0] for step in range(5, 10)]
    assert again != seen[::20], "a new epoch has a new order"


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(ConfigError, match="gives 9 tokens to train and 1 to validate on, too few for samples of 10"):
        open_sides(
            DataSection(str(tmp_path / "a.txt")), seq_len=10, global_batch=1, vocabulary=999, cache=tmp_path / "cache"
        )
