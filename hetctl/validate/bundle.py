"""The archive for a report: what is in it, masked, and written in one go. Nothing in it was not masked first."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import finite, write_atomically
from hetctl.comm.contract.units import MiB
from hetctl.probe.masking import ReportMasker

MAX_FILE_BYTES = 2 * MiB  # of one piece of evidence; the beginning and the end are kept
MAX_READ_BYTES = 32 * MiB
FOLDER = "hetctl-validation"


def check_target(path: Path, *, force: bool) -> None:
    """Raise ConfigError unless a bundle can be written there, before hours are spent on it."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="name a file, such as out.tgz")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already", hint="choose another name, or --force to replace it")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} is no folder that can be written to", hint="choose another place")


def masked_files(documents: Mapping[str, Any], evidence: Path, masker: ReportMasker) -> dict[str, bytes]:
    """Everything that will be in the archive, by name: documents (text as it is, else JSON) and evidence files."""
    texts = {name: d if isinstance(d, str) else json.dumps(finite(d)) for name, d in documents.items()}
    texts |= {f"evidence/{p.relative_to(evidence).as_posix()}": _read(p) for p in _regular_files(evidence)}
    masker.learn_texts(texts.items())  # all of them first: one file may name what another only shows
    # cut only after masking: half a name would not be known for one
    return {masker.text(name): _cut(_masked(name, text, masker).encode()) for name, text in sorted(texts.items())}


def write_bundle(path: Path, files: Mapping[str, bytes]) -> None:
    """Write the archive atomically. Raises ConfigError where it cannot be written."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")  # no owner, no time: those identify too
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _regular_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if stat.S_ISREG(p.lstat().st_mode))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_READ_BYTES).decode("utf-8", "replace").replace("\x00", "")


def _masked(name: str, content: str, masker: ReportMasker) -> str:
    """JSON is taken apart first, since its escapes would hide what stands behind them."""
    try:
        if name.endswith(".json"):
            return json.dumps(masker.data(json.loads(content)), indent=1, ensure_ascii=False) + "\n"
        if name.endswith(".jsonl"):
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            return "".join(json.dumps(masker.data(row), ensure_ascii=False) + "\n" for row in rows)
    except (ValueError, RecursionError):
        pass  # not what its name says, or cut: it is text
    return masker.text(content)


def _cut(content: bytes) -> bytes:
    if len(content) <= MAX_FILE_BYTES:
        return content
    half = MAX_FILE_BYTES // 2
    return content[:half] + b"\n[the middle is left out]\n" + content[-half:]
