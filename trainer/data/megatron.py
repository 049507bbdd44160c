"""Token files in Megatron's format (.bin beside .idx): already tokenised, mapped as they are."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.comm.errors import ConfigError
from hetctl.comm.units import MiB

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of tokens, sequences, documents
TYPES: dict[int, Any] = {1: np.uint8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
SCAN = 1 << 24  # tokens looked at at a time


@dataclass(frozen=True)
class Indexed:
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
            return max(1, int(len(self.tokens) * (1 - share)))
        wanted = int(len(self.tokens) * (1 - share))
        return int(inner[min(int(np.searchsorted(inner, wanted)), len(inner) - 1)])


def is_megatron(source: str) -> bool:
    """Whether a source names such files: x.bin, x.idx, or their common x."""
    path = Path(source)
    return path.suffix in (".bin", ".idx") or (not path.exists() and path.with_name(path.name + ".idx").is_file())


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


def open_indexed(source: str) -> Indexed:
    """Map the tokens. Raises ConfigError for files that are not what they say."""
    tokens_file, index_file = files_of(source)
    with index_file.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ConfigError(f"{index_file} is no index of Megatron's")
        _, version, kind, sequences, documents = HEADER.unpack(head)
        if version != 1 or kind not in TYPES:
            raise ConfigError(f"{index_file}: version {version}, token type {kind} is not supported")
        sizes = np.fromfile(file, dtype=np.int32, count=sequences)
        np.fromfile(file, dtype=np.int64, count=sequences)  # byte offsets: the tokens lie in a row
        bounds = np.fromfile(file, dtype=np.int64, count=documents)
    dtype = np.dtype(TYPES[kind])
    if len(bounds) != documents or int(sizes.sum(dtype=np.int64)) * dtype.itemsize != tokens_file.stat().st_size:
        raise ConfigError(f"{tokens_file} and its index do not match: one of them is cut short")
    if not sizes.sum():
        raise ConfigError(f"'{source}' holds no text")
    edges = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)))
    return Indexed(np.memmap(tokens_file, dtype=dtype, mode="r"), edges[bounds[bounds > 0]])
