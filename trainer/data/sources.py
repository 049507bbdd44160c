"""Documents: the texts of a source (a file, a .jsonl, a folder, or Python's own library), in a fixed order."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_text
from hetctl.comm.contract.units import MiB
from hetctl.trainer.data.megatron import files_of, is_megatron
from hetctl.trainer.recipe import STDLIB, DataSection

TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    ".jsonl",
    ".parquet",
)
MAX_TOKENIZER_BYTES = 256 * MiB
SHOWN = 20  # columns of a table that an error names
LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3")


@dataclass(frozen=True)
class Document:
    """One text and the name it is known by (which decides whether it is held out)."""

    name: str
    text: str


def source_files(section: DataSection) -> list[Path]:
    """The files of a source, sorted. Raises ConfigError when there is nothing to read."""
    if section.source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not set(p.relative_to(root).parts) & set(LEFT_OUT)]
        return _some(files, f"no standard library sources under {root}")
    if is_megatron(section.source):
        return list(files_of(section.source))
    path = Path(section.source)
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES]
        return _some(files, f"the folder {path} holds no text to train on")
    if not path.is_file():
        raise ConfigError(f"the data path '{path}' does not exist", hint="set data.source to a file or folder of text")
    return _some([path], "")


def documents(section: DataSection) -> Iterator[Document]:
    """All texts of the source in a fixed order. Raises ConfigError for files and lines that cannot be read."""
    root = Path(sysconfig.get_paths()["stdlib"]) if section.source == STDLIB else Path(section.source)
    for path in source_files(section):
        name = str(path.relative_to(root)) if path != root else path.name
        try:
            yield from _texts(path, name, section.field)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def fingerprint(section: DataSection) -> str:
    """A digest of the source as it stands now: names, sizes and modification times. Raises ConfigError."""
    digest = hashlib.sha256(repr(section).encode())
    for path in source_files(section):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    if section.tokenizer != "bytes":
        path = Path(section.tokenizer)
        digest.update(read_text(path, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES).encode())
        settings = path.with_name("tokenizer_config.json")  # it may name the end of a text
        if settings.is_file():
            digest.update(read_text(settings, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES).encode())
    return digest.hexdigest()[:24]


def held_out(name: str, section: DataSection) -> bool:
    """Whether a document belongs to validation: by a hash of its name, so that it never changes sides."""
    digest = hashlib.sha256(f"{section.seed}/{name}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < section.validation_share


def _texts(path: Path, name: str, field: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _jsonl(path, name, field)
    elif path.suffix == ".parquet":
        yield from _parquet(path, name, field)
    else:
        yield Document(name, path.read_text(encoding="utf-8", errors="replace"))


def _jsonl(path: Path, name: str, field: str) -> Iterator[Document]:
    """One document per line that is not blank, whether or not the file starts with a byte order mark."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not _is_utf8(line):
                raise ConfigError(f"{path}, line {number}: not UTF-8", hint="write the file anew as UTF-8")
            try:
                text = json.loads(line)[field]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(
                    f"{path}, line {number}: no text under the key '{field}'", hint="set data.field to the text's key"
                ) from None
            yield Document(f"{name}#{number}", text)


def _is_utf8(line: str) -> bool:
    """Whether a line had no byte that decoding had to escape."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    """One document per row, read a batch of rows at a time."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError("the package 'pyarrow' is not installed", hint="pip install hetctl[parquet]") from None
    try:
        number, file = 0, ParquetFile(path)
        if field not in (there := file.schema_arrow.names):
            raise ConfigError(
                f"{path} has no column '{field}'", hint=f"set data.field to one of: {', '.join(there[:SHOWN])}"
            )
        for batch in file.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise ConfigError(f"{path}, row {number}: no text under the column '{field}'")
                yield Document(f"{name}#{number}", text)
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a text that is not UTF-8
        raise ConfigError(f"{path} cannot be read as parquet with a column '{field}': {error}") from None


def _some(files: list[Path], otherwise: str) -> list[Path]:
    found = sorted(f for f in files if f.stat().st_size > 0)
    if not found:
        raise ConfigError(otherwise or f"the data path '{files[0]}' is empty", hint="set data.source to some text")
    return found
