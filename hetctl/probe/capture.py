"""Raw material of all hosts in one archive, identities masked: for bug reports, and to be discovered again."""

from __future__ import annotations

import gzip
import io
import json
import re
import secrets
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.files import parse_json, write_atomically
from hetctl.comm.contract.units import MiB, show_bytes
from hetctl.comm.contract.values import decode, encode
from hetctl.probe.assemble import parse
from hetctl.probe.masking import CaptureMasker
from hetctl.probe.raw import MAX_DOCUMENT_BYTES, Raw, load

SCHEMA_VERSION = 1
MAX_HOSTS = 4096
MAX_TOTAL_BYTES = 1024 * MiB  # unpacked
_MEMBER = re.compile(r"manifest\.json|hosts/\d{4}\.json")
_HINT = "captures are written by `hetctl discover --capture`"


@dataclass(frozen=True)
class Recording:
    """One host of a capture: its raw material, or why there is none (`status` as in Cluster.hosts)."""

    name: str
    raw: Raw | None = None
    status: str = "ok"
    reason: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class _Entry:
    name: str
    file: str | None = None
    status: str = "ok"
    reason: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class _Manifest:
    schema_version: int
    hosts: tuple[_Entry, ...]


def write_capture(path: Path, recordings: Sequence[Recording], *, salt: bytes | None = None) -> None:
    """Write the archive atomically, everything that identifies masked. `salt` fixes the masks (tests only)."""
    masker = _masker(recordings, salt or secrets.token_bytes(32))
    masked = [mask(recording, masker) for recording in recordings]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        entries = []
        for number, recording in enumerate(masked):
            file = f"hosts/{number:04d}.json" if recording.raw else None
            entries.append(_Entry(recording.name, file, recording.status, recording.reason, recording.address))
            if recording.raw and file:
                _add(archive, file, encode(recording.raw))
        _add(archive, "manifest.json", encode(_Manifest(SCHEMA_VERSION, tuple(entries))))
    write_atomically(path, buffer.getvalue())


def read_capture(path: Path) -> tuple[Recording, ...]:
    """The recordings of an archive. Nothing is unpacked to disk; sizes are capped.

    Raises ConfigError when it is not a capture, and HetctlError when a document in it is not one.
    """
    members = dict(_members(path))
    if "manifest.json" not in members:
        raise ConfigError(f"{path} has no manifest", hint=_HINT)
    try:
        data = parse_json(members["manifest.json"])
    except ValueError:
        raise ConfigError(f"{path}: the manifest is not JSON", hint=_HINT) from None
    manifest = decode(_Manifest, data, where=f"{path.name}: manifest")
    if manifest.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema_version {manifest.schema_version}; this hetctl reads {SCHEMA_VERSION}")
    return tuple(_recording(path, entry, members) for entry in manifest.hosts)


def mask(recording: Recording, masker: CaptureMasker) -> Recording:
    """One recording with all that identifies replaced."""
    return Recording(
        name=masker.host(recording.name),
        raw=_masked_raw(recording.raw, masker) if recording.raw else None,
        status=recording.status,
        reason=masker.text(recording.reason) if recording.reason else recording.reason,
        address=masker.host(recording.address) if recording.address else recording.address,
    )


def _recording(path: Path, entry: _Entry, members: Mapping[str, bytes]) -> Recording:
    raw = None
    if entry.file is not None:
        if entry.file not in members:
            raise ConfigError(f"{path}: the document of host '{entry.name}' is missing", hint=_HINT)
        try:
            raw = load(members[entry.file])
        except HetctlError as error:
            raise ConfigError(f"{path}: host '{entry.name}': {error.message}") from None
    return Recording(entry.name, raw, entry.status, entry.reason, entry.address)


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The known members of an archive, read as a stream and never past their caps."""
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) as plain:
            capped = _Capped(plain, path)
            with tarfile.open(fileobj=capped, mode="r|") as archive:
                for count, member in enumerate(archive):
                    if count > MAX_HOSTS:
                        raise ConfigError(f"{path} has more than {MAX_HOSTS} members", hint=_HINT)
                    content = _content(path, archive, member)
                    yield member.name, content
    except FileNotFoundError:
        raise ConfigError(f"there is no capture at {path}", hint="check the path") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a capture: {error}", hint=_HINT) from None


def _content(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg() or not _MEMBER.fullmatch(member.name):
        raise ConfigError(f"{path} holds something that no capture holds", hint=_HINT)
    limit = 2 * MAX_DOCUMENT_BYTES
    if not 0 <= member.size <= limit:
        raise ConfigError(f"{path}: a document of {show_bytes(member.size)} is too large", hint=_HINT)
    file = archive.extractfile(member)
    return file.read(limit) if file else b""


class _Capped(io.RawIOBase):
    """A reader that refuses to unpack a bomb."""

    def __init__(self, source: gzip.GzipFile, path: Path) -> None:
        self._source, self._path, self._left = source, path, MAX_TOTAL_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size if size >= 0 else MiB, MiB))
        self._left -= len(data)
        if self._left < 0:
            raise ConfigError(f"{self._path} unpacks to more than {show_bytes(MAX_TOTAL_BYTES)}", hint=_HINT)
        return data


def _add(archive: tarfile.TarFile, name: str, data: Any) -> None:
    payload = json.dumps(data).encode("ascii")
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(payload), 0o644
    archive.addfile(info, io.BytesIO(payload))


# --- masking of documents ------------------------------------------------------------------------------------------


def _masker(recordings: Sequence[Recording], salt: bytes) -> CaptureMasker:
    """A masker that has seen every name, serial number and user of all hosts."""
    names = {r.name for r in recordings}
    raws = [r.raw for r in recordings if r.raw]
    names.update(name for raw in raws if (name := raw.text("/proc/sys/kernel/hostname")))
    masker = CaptureMasker(names, salt)
    for raw in raws:
        masker.learn_facts(encode(parse(raw)))  # before texts: what they call a serial number may be more
        masker.learn_texts([*raw.files.items(), *((name, tool.stdout) for name, tool in raw.tools.items())])
        masker.learn("user", [raw.values.get("user")])
    return masker


def _masked_raw(raw: Raw, masker: CaptureMasker) -> Raw:
    files = {masker.text(path): _masked_file(path, text, masker) for path, text in raw.files.items()}
    values = {k: masker.data(v) for k, v in raw.values.items() if k != "environment"}
    environment = raw.values.get("environment")
    if isinstance(environment, Mapping):
        kept = {k: v for k, v in environment.items() if not str(k).startswith("SLURM_")}
        values["environment"] = masker.data(kept)
    everything = encode(replace(raw, files={}, values={}, interpreters=()))
    rest = decode(Raw, masker.data(everything), where="masked")
    pythons = tuple(_masked_interpreter(entry, masker) for entry in raw.interpreters)
    return replace(rest, files=files, values=values, interpreters=pythons, python=raw.python)


def _masked_file(path: str, text: str, masker: CaptureMasker) -> str:
    if path == "/proc/sys/kernel/hostname":
        return masker.host(text.strip()) + "\n"
    return masker.if_inet6(text) if path == "/proc/net/if_inet6" else masker.text(text)


def _masked_interpreter(entry: Mapping[str, Any], masker: CaptureMasker) -> dict[str, Any]:
    """Everything but the packages' versions, of which some look like addresses."""
    return {k: v if k == "packages" else masker.data(v) for k, v in entry.items()}
