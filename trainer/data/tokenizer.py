"""The tokenizer: text to tokens, by bytes or as a Hugging Face tokenizer.json has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json, read_text
from hetctl.trainer.data.sources import MAX_TOKENIZER_BYTES
from hetctl.trainer.recipe import DataSection

BYTES_VOCABULARY = 257  # 256 bytes and the end of a document
Tokens = npt.NDArray[np.uint32]
Placed = tuple[Tokens, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back; `end` closes a document."""

    encode: Callable[[str], Tokens]
    encode_placed: Callable[[str], Placed]  # and the characters [first, past_last) that each is, [tokens, 2]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int  # every token is below it
    end: int


def load_tokenizer(section: DataSection) -> Tokenizer:
    """The byte tokenizer, or a Hugging Face tokenizer.json. Raises ConfigError when it cannot be used."""
    if section.tokenizer == "bytes":
        return Tokenizer(_encode_bytes, _place_bytes, _decode_bytes, BYTES_VOCABULARY, 256)
    path = Path(section.tokenizer)
    text = read_text(path, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES)
    try:
        from tokenizers import Tokenizer as HuggingFaceTokenizer
    except ImportError:
        raise ConfigError("the package 'tokenizers' is not installed", hint="pip install hetctl[tokenizers]") from None
    try:
        loaded = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise ConfigError(f"{path} is not a Hugging Face tokenizer.json: {error}") from None
    loaded.no_truncation()  # a file may ask for both: right for single inputs, not for whole documents
    loaded.no_padding()
    end = _end_token(loaded, path)
    ids = loaded.get_vocab(with_added_tokens=True).values()  # they may have gaps: how many there are bounds nothing
    return Tokenizer(*_encoders(loaded, path), loaded.decode, max(ids) + 1, end)


def _encoders(loaded: Any, path: Path) -> tuple[Callable[[str], Tokens], Callable[[str], Placed]]:
    def encoding(text: str) -> Any:
        try:
            return loaded.encode(_whole(text), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception, for an unknown token it does not have, say
            raise ConfigError(f"{path} cannot encode the text: {error}", hint="take another tokenizer.json") from None

    def encode(text: str) -> Tokens:
        return np.asarray(encoding(text).ids, dtype=np.uint32)

    def encode_placed(text: str) -> Placed:
        found = encoding(text)
        return np.asarray(found.ids, dtype=np.uint32), np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)

    return encode, encode_placed


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def _whole(text: str) -> str:
    """A text without halves of characters (lone surrogates, which JSON can hold and UTF-8 cannot)."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _encode_bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint32)


def _place_bytes(text: str) -> Placed:
    tokens = _encode_bytes(text)
    characters = np.cumsum(tokens & 0xC0 != 0x80, dtype=np.int64)  # a byte 10xxxxxx goes on with a character
    return tokens, np.stack((characters - 1, characters), axis=1)


def _end_token(loaded: Any, path: Path) -> int:
    """The token that closes a document: a usual one, or what tokenizer_config.json beside the file names."""
    beside = path.with_name("tokenizer_config.json")
    for word in ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", _named_end(beside)):
        token = loaded.token_to_id(word)
        if token is not None:
            return int(token)
    raise ConfigError(
        f"{path} has no end-of-text token hetctl knows",
        hint=f"known: <|end_of_text|>, </s>, <|endoftext|>, or the eos_token of {beside}",
    )


def _named_end(path: Path) -> str:
    """The `eos_token` of a tokenizer_config.json, a word or an object with its content; empty where it has none."""
    try:
        named = read_json(path)["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    word = named.get("content") if isinstance(named, dict) else named
    return word if isinstance(word, str) else ""
