"""Tokens: documents through a tokenizer into one flat file per side (training, validation), made once and mapped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.megatron import cut_at, digest_of, files_of, is_megatron, open_indexed
from hetctl.trainer.data.sources import documents, fingerprint, held_out, is_chat, is_pairs
from hetctl.trainer.data.tokenizer import Tokenizer, load_tokenizer
from hetctl.trainer.recipe import DataSection

BOUND = "tokens_below"  # the key under which a cache keeps it; one without the key is made anew
SIDES = ("train", "validation")
BEARS_LOSS = np.uint32(1 << 31)  # set in a conversation's token that the assistant says
TokenArray = npt.NDArray[Any]  # whole numbers of any width
Ends = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Both sides of a source as flat token arrays: documents in order, each followed by the end token."""

    train: TokenArray
    validation: TokenArray
    vocabulary: int  # every token is below it
    digest: str = ""  # of both sides: equal on hosts that hold the same text
    ends: tuple[Ends, Ends] | None = None  # where conversations end, on both sides; None: text
    together: int = 1  # conversations that are one sample: two of a preference pair


def open_tokens(section: DataSection, cache: Path | None = None) -> Tokens:
    """The tokens of a source, from the cache where they are already made. Several processes may ask at once."""
    folder = (cache or default_cache()) / fingerprint(section)
    if not _is_made(folder):
        _make_once(section, folder)
    about = json.loads((folder / "tokens.json").read_text())
    if is_megatron(section.source):
        mapped = open_indexed(section.source).tokens
        return Tokens(mapped[: about["train"]], mapped[about["train"] :], about[BOUND], about["digest"])
    train, validation = (np.memmap(folder / f"{side}.bin", dtype=np.uint32, mode="r") for side in SIDES)
    ends = (np.load(folder / "train.npy"), np.load(folder / "validation.npy")) if "conversations" in about else None
    return Tokens(train, validation, about[BOUND], about["digest"], ends, about.get("together", 1))


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
    for path in (folder / f"{side}{suffix}" for suffix in (".bin", ".npy") for side in SIDES):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


def _make(section: DataSection, folder: Path) -> None:
    if is_megatron(section.source):
        (folder / "tokens.json").write_text(json.dumps(_about_megatron(section)))
        return
    tokenizer, chat = load_tokenizer(section), is_chat(section)
    together = 1 + is_pairs(section)
    lengths = _write((_conversations if chat else _texts)(section, tokenizer), section, folder)
    counts = {side: sum(lengths[side]) for side in SIDES}
    if sum(counts.values()) == sum(map(len, lengths.values())):  # nothing but ends
        raise ConfigError(f"'{section.source}' holds no text")
    if not all(counts.values()):
        _split_tail(folder, lengths, counts, section, whole=together if chat else 0)
    about: dict[str, Any] = {BOUND: tokenizer.vocabulary, **counts}
    if chat:
        about |= {"conversations": sum(map(len, lengths.values())), "together": together}
        for side in SIDES:
            np.save(folder / f"{side}.npy", np.cumsum(lengths[side], dtype=np.int64))
    (folder / "tokens.json").write_text(json.dumps(about | {"digest": _digest(folder)}))


def _write(pieces: Iterator[tuple[str, TokenArray]], section: DataSection, folder: Path) -> dict[str, array[int]]:
    """Write each piece to its side. Returns how long those of each side are."""
    lengths = {side: array("q") for side in SIDES}
    with ExitStack() as open_files:
        files = {side: open_files.enter_context((folder / f"{side}.bin").open("wb")) for side in SIDES}
        for name, tokens in pieces:
            side = "validation" if held_out(name, section) else "train"
            files[side].write(tokens.tobytes())
            lengths[side].append(len(tokens))
    return lengths


def _texts(section: DataSection, tokenizer: Tokenizer) -> Iterator[tuple[str, TokenArray]]:
    end = np.asarray([tokenizer.end], dtype=np.uint32)
    for document in documents(section):
        yield document.name, np.concatenate((tokenizer.encode(document.text), end))


def _conversations(section: DataSection, tokenizer: Tokenizer) -> Iterator[tuple[str, TokenArray]]:
    try:
        from hetctl.trainer.data.samples import samples
    except ImportError:
        raise ConfigError("the package 'jinja2' is not installed", hint="pip install hetctl[chat]") from None
    for sample in samples(section, tokenizer):
        yield sample.name, sample.tokens | (BEARS_LOSS * sample.bears_loss).astype(np.uint32)


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


def _split_tail(
    folder: Path, lengths: dict[str, array[int]], counts: dict[str, int], section: DataSection, *, whole: int
) -> None:
    """Too few documents to hold whole ones out (one text file, say): hold out the end of the text, or the last of
    conversations, `whole` of which stay together."""
    every = lengths["train"] + lengths["validation"]
    both = np.concatenate([np.fromfile(folder / f"{side}.bin", dtype=np.uint32) for side in SIDES])
    cut = cut_at(len(both), section.validation_share)
    if whole:
        kept = whole * cut_at(len(every) // whole, section.validation_share)
        lengths.update(train=every[:kept], validation=every[kept:])
        cut = sum(lengths["train"])
        if cut == len(both):
            raise ConfigError(
                f"'{section.source}' holds one {'pair' if whole > 1 else 'conversation'}: there is none to validate on"
            )
    both[:cut].tofile(folder / "train.bin")
    both[cut:].tofile(folder / "validation.bin")
    counts.update(train=cut, validation=len(both) - cut)
