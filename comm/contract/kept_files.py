"""Files that people may edit: written with a digest of themselves, and replaced knowingly, the old one kept as .bak."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import as_yaml, write_atomically

_STAMP = "# As it was written while its digest is "
_STAMPED = re.compile(re.escape(_STAMP) + r"(\w+)\n(.*)", re.DOTALL)


def write_stamped(path: Path, data: Any, *, header: str, keep: bool = False) -> Path | None:
    """Data as YAML, atomically, under a digest of it. Where the old one is kept, if asked to and it differs."""
    text = as_yaml(data, header=header)
    kept = kept_name(path) if keep and path.is_file() and not _read(path).endswith(text) else None
    if kept:
        write_atomically(kept, path.read_bytes())
    write_atomically(path, f"{_STAMP}{_digest(text)}\n{text}")
    return kept


def was_edited(path: Path) -> bool:
    """Whether a file is not as it was written; so is one that no digest speaks for."""
    found = _STAMPED.fullmatch(_read(path))
    return found is None or found[1] != _digest(found[2])


def refuse_edited(path: Path | None, *, force: bool) -> None:
    """Raise ConfigError rather than let a file be replaced that somebody may have edited."""
    if path is not None and path.is_file() and not force and was_edited(path):
        raise ConfigError(
            f"{path} is not as hetctl wrote it: somebody may have edited it",
            hint=f"write elsewhere with -o, or replace it with --force (it is then kept as {kept_name(path)})",
        )


def kept_name(path: Path) -> Path:
    """Where the old one is kept: in the first .bak, .bak.1, .. that holds nothing which somebody edited."""
    names = (path.with_name(path.name + (f".bak.{n}" if n else ".bak")) for n in itertools.count())
    return next(name for name in names if not name.is_file() or not was_edited(name))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
