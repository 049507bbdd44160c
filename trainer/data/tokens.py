"""Tokens: documents through a tokenizer into one flat file per side (training, validation), made once and mapped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_text
from hetctl.trainer.data.megatron import cut_at, digest_of, files_of, is_megatron, open_indexed
from hetctl.trainer.data.sources import MAX_TOKENIZER_BYTES, documents, fingerprint, held_out
from hetctl.trainer.recipe import DataSection

BYTES_VOCABULARY = 257  # 256 bytes and the end of a document
BOUND = "tokens_below"  # the key under which a cache keeps it; one without the key is made anew
TokenArray = npt.NDArray[Any]  # whole numbers of any width
Encode = Callable[[str], TokenArray]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Tokens:
    """Both sides of a source as flat token arrays: documents in order, each followed by the end token."""

    train: TokenArray
    validation: TokenArray
    vocabulary: int  # every token is below it
    digest: str = ""  # of both sides: equal on hosts that hold the same text


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back; `end` closes a document."""

    encode: Encode
    decode: Decode
    vocabulary: int  # every token is below it
    end: int


def load_tokenizer(section: DataSection) -> Tokenizer:
    """The byte tokenizer, or a Hugging Face tokenizer.json. Raises ConfigError when it cannot be used."""
    if section.tokenizer == "bytes":
        return Tokenizer(_encode_bytes, _decode_bytes, BYTES_VOCABULARY, 256)
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
    return Tokenizer(_encoder(loaded, path), loaded.decode, max(ids) + 1, end)


def open_tokens(section: DataSection, cache: Path | None = None) -> Tokens:
    """The tokens of a source, from the cache where they are already made. Several processes may ask at once."""
    folder = (cache or default_cache()) / fingerprint(section)
    if not _is_made(folder):
        _make_once(section, folder)
    about = json.loads((folder / "tokens.json").read_text())
    if is_megatron(section.source):
        mapped = open_indexed(section.source).tokens
        return Tokens(mapped[: about["train"]], mapped[about["train"] :], about[BOUND], about["digest"])
    sides = (np.memmap(folder / f"{side}.bin", dtype=np.uint32, mode="r") for side in ("train", "validation"))
    train, validation = sides
    return Tokens(train, validation, about[BOUND], about["digest"])


def default_cache() -> Path:
    """Where tokens are kept between runs: XDG_CACHE_HOME (which the XDG wants absolute) or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hetctl" / "tokens"


def _make_once(section: DataSection, folder: Path) -> None:
    """Make the tokens unless another process does. Raises ConfigError, also where the cache cannot be written."""
    try:
        _make_alone(section, folder)
    except OSError as error:
        raise ConfigError(
            f"tokens cannot be kept in {folder.parent}: {error}",
            hint="set XDG_CACHE_HOME to a folder that can be written and has room",
        ) from None


def _make_alone(section: DataSection, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_made(folder):
            return  # another process made them meanwhile
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
        ) as temporary:
            _make(section, Path(temporary))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)


def _is_made(folder: Path) -> bool:
    try:
        about = json.loads((folder / "tokens.json").read_text())
        return BOUND in about and all(about.values())  # none empty: an older hetctl made such sides
    except (OSError, ValueError):
        return False


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for side in ("train", "validation"):
        with (folder / f"{side}.bin").open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


def _make(section: DataSection, folder: Path) -> None:
    if is_megatron(section.source):
        (folder / "tokens.json").write_text(json.dumps(_about_megatron(section)))
        return
    tokenizer = load_tokenizer(section)
    counts, texts = {"train": 0, "validation": 0}, 0
    end = np.asarray([tokenizer.end], dtype=np.uint32)
    files: dict[str, Any] = {side: (folder / f"{side}.bin").open("wb") for side in counts}
    for document in documents(section):
        side = "validation" if held_out(document.name, section) else "train"
        words = tokenizer.encode(document.text)
        texts += len(words)
        tokens = np.concatenate((words, end))
        files[side].write(tokens.tobytes())
        counts[side] += len(tokens)
    for file in files.values():
        file.close()
    if not texts:
        raise ConfigError(f"'{section.source}' holds no text")
    if not all(counts.values()):
        _split_tail(folder, counts, section)
    about = {BOUND: tokenizer.vocabulary, **counts, "digest": _digest(folder)}
    (folder / "tokens.json").write_text(json.dumps(about))


def _about_megatron(section: DataSection) -> dict[str, Any]:
    """What is kept of files that are tokens already. Raises ConfigError for tokens that no model knows."""
    indexed = open_indexed(section.source)
    low, high = indexed.bounds()
    if low < 0:
        raise ConfigError(
            f"{files_of(section.source)[0]} holds the negative token {low}",
            hint="tokens count from 0: make the file anew, or see whether its index names the right type of tokens",
        )
    cut = indexed.cut(section.validation_share)
    return {BOUND: high + 1, "train": cut, "digest": digest_of(section.source)}


def _split_tail(folder: Path, counts: dict[str, int], section: DataSection) -> None:
    """Too few documents to hold whole ones out (one text file, say): hold out the end of the text."""
    both = np.concatenate([np.fromfile(folder / f"{side}.bin", dtype=np.uint32) for side in counts])
    cut = cut_at(len(both), section.validation_share)
    both[:cut].tofile(folder / "train.bin")
    both[cut:].tofile(folder / "validation.bin")
    counts.update(train=cut, validation=len(both) - cut)


def _encoder(loaded: Any, path: Path) -> Encode:
    def encode(text: str) -> TokenArray:
        try:
            found = loaded.encode(_whole(text), add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception, for an unknown token it does not have, say
            raise ConfigError(f"{path} cannot encode the text: {error}", hint="take another tokenizer.json") from None
        return np.asarray(found, dtype=np.uint32)

    return encode


def _whole(text: str) -> str:
    """A text without halves of characters (lone surrogates, which JSON can hold and UTF-8 cannot)."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _encode_bytes(text: str) -> TokenArray:
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint32)


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


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
        named = json.loads(path.read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    word = named.get("content") if isinstance(named, dict) else named
    return word if isinstance(word, str) else ""
