"""Rows: the lines of a .jsonl, the rows of a .parquet, or of the .arrow files of a saved Hugging Face dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError

ROW_SUFFIXES = (".jsonl", ".parquet", ".arrow")
SHOWN = 20  # columns of a table that an error names


@dataclass(frozen=True)
class Row:
    """One row: where it stands, for errors, its number from 1, and what it says; None: a line that is not JSON."""

    place: str
    number: int
    values: Any


def rows_of(path: Path, wanted: Collection[str]) -> Iterator[Row]:
    """The rows of a file; of a table only the `wanted` columns, and without what is null. Raises ConfigError."""
    if path.suffix == ".jsonl":
        for number, line in _lines(path):
            yield Row(f"{path}, line {number}", number, _parsed(line))
        return
    there = keys_of(path)
    if not any(name in wanted for name in there):
        names = " or ".join(f"'{name}'" for name in wanted)
        raise ConfigError(f"{path} has no column {names}", hint=f"set data.field to one of: {', '.join(there[:SHOWN])}")
    for number, values in enumerate(_table_rows(path, [name for name in there if name in wanted]), start=1):
        yield Row(f"{path}, row {number}", number, values)


def keys_of(path: Path) -> list[str]:
    """The columns of a table, or the keys of a .jsonl's first line (none: it is no JSON object). Raises ConfigError."""
    if path.suffix == ".jsonl":
        first = next((_parsed(line) for _, line in _lines(path)), None)
        return list(first) if isinstance(first, dict) else []
    with _reading(path):
        return _opened(path)[0]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank and their numbers, whether or not the file starts with a byte order mark."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                if not _is_utf8(line):
                    raise ConfigError(f"{path}, line {number}: not UTF-8", hint="write the file anew as UTF-8")
                yield number, line


def _is_utf8(line: str) -> bool:
    """Whether a line had no byte that decoding had to escape."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _table_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    with _reading(path):
        for batch in _opened(path)[1](columns):
            yield from map(_without_nulls, batch.to_pylist())


def _opened(path: Path) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """The columns of a table, and what reads some of them, a batch of rows at a time."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if path.suffix == ".parquet":
        file = ParquetFile(path)
        return file.schema_arrow.names, lambda columns: file.iter_batches(columns=columns)
    stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
    return stream.schema.names, lambda columns: (batch.select(columns) for batch in stream)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What pyarrow says of a table that cannot be read is raised as ConfigError."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("the package 'pyarrow' is not installed", hint="pip install hetctl[parquet]") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a text that is not UTF-8
        raise ConfigError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Columns have the same keys in all rows: what a row did not say is null in it."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
