"""Token files in Megatron's format (.bin beside .idx): already tokenised, mapped as they are."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import MiB

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of tokens, sequences, documents
TYPES: dict[int, Any] = {1: np.uint8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
PER_SEQUENCE = 4 + 8  # bytes: its size and its offset
PER_DOCUMENT = 8  # bytes: the number of its first sequence
SCAN = 1 << 24  # tokens looked at at a time


@dataclass(frozen=True)
class IndexedTokens:
    """The tokens of all documents in a row, and where each document ends."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest token. Looks at all of them."""
        parts = [self.tokens[k : k + SCAN] for k in range(0, len(self.tokens), SCAN)]
        found = [(int(part.min()), int(part.max())) for part in parts]
        return min(low for low, _ in found), max(high for _, high in found)

    def cut(self, share: float) -> int:
        """The end of the document that leaves about `share` of the tokens behind it, at least one document."""
        inner = self.ends[:-1]
        if not len(inner):
            return cut_at(len(self.tokens), share)
        wanted = int(len(self.tokens) * (1 - share))
        return int(inner[min(int(np.searchsorted(inner, wanted)), len(inner) - 1)])


def cut_at(tokens: int, share: float) -> int:
    """Where to cut so many tokens to leave about `share` of them behind it: at least one on each side of two."""
    return max(1, min(int(tokens * (1 - share)), tokens - 1))


def is_megatron(source: str) -> bool:
    """Whether a source names such files: x.bin, x.idx, or their common x."""
    path = Path(source)
    return path.suffix in (".bin", ".idx") or (not path.exists() and os.path.isfile(f"{path}.idx"))


def files_of(source: str) -> tuple[Path, Path]:
    """(tokens, index). Raises ConfigError when one is missing."""
    path = Path(source)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = (stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx"))
    for file in pair:
        if not file.is_file():
            raise ConfigError(f"the data path '{file}' does not exist", hint="Megatron's .bin and .idx go together")
    return pair


def digest_of(source: str) -> str:
    """Equal where the files are: of the whole index, and of the tokens' ends (they may be terabytes)."""
    tokens, index = files_of(source)
    digest = hashlib.sha256(index.read_bytes())
    with tokens.open("rb") as file:
        digest.update(file.read(MiB))
        file.seek(max(0, tokens.stat().st_size - MiB))
        digest.update(file.read())
    return digest.hexdigest()[:24]


def open_indexed(source: str) -> IndexedTokens:
    """Map the tokens. Raises ConfigError for files that are not what they say."""
    tokens_file, index_file = files_of(source)
    with index_file.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ConfigError(f"{index_file} is no index of Megatron's")
        _, version, kind, sequences, documents = HEADER.unpack(head)
        if version != 1 or kind not in TYPES:
            raise ConfigError(f"{index_file}: version {version}, token type {kind} is not supported")
        if HEADER.size + sequences * PER_SEQUENCE + documents * PER_DOCUMENT > index_file.stat().st_size:
            raise ConfigError(f"{index_file} is too short for its {sequences} sequences and {documents} documents")
        sizes = np.fromfile(file, dtype=np.int32, count=sequences)
        file.seek(sequences * 8, os.SEEK_CUR)  # byte offsets: the tokens lie in a row
        bounds = np.fromfile(file, dtype=np.int64, count=documents)
    dtype = np.dtype(TYPES[kind])
    if int(sizes.sum(dtype=np.int64)) * dtype.itemsize != tokens_file.stat().st_size:
        raise ConfigError(f"{tokens_file} and its index do not match: one of them is cut short")
    if not sizes.any():
        raise ConfigError(f"'{source}' holds no text")
    _check_order(index_file, sizes, bounds)
    edges = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)))
    return IndexedTokens(np.memmap(tokens_file, dtype=dtype, mode="r"), edges[bounds[bounds > 0]])


def _check_order(index_file: Path, sizes: npt.NDArray[np.int32], bounds: npt.NDArray[np.int64]) -> None:
    """Raise ConfigError unless sequences have sizes, and documents lie within them one after the other."""
    if sizes.min() < 0:
        raise ConfigError(f"{index_file} has a sequence of {sizes.min()} tokens")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > len(sizes) or (np.diff(bounds) < 0).any()):
        raise ConfigError(f"{index_file} has documents that are not made of its {len(sizes)} sequences in order")
