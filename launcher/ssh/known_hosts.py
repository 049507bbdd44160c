"""The known_hosts format, read strictly: which host keys a host may show, fingerprints, and pinning new ones."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class HostKey:
    """A public host key: its type (ssh-ed25519) and its wire form."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """SHA256:..., as OpenSSH prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Line:
    """One entry of a known_hosts file. `marker` is '', '@revoked' or '@cert-authority'."""

    patterns: tuple[str, ...]
    key: HostKey
    marker: str = ""

    def covers(self, name: str) -> bool:
        """Whether the entry speaks of `name`: hashed names, wildcards and '!' as OpenSSH reads them."""
        found = False
        for pattern in self.patterns:
            if pattern.startswith("|1|"):
                found |= _hash_matches(pattern, name)
            elif pattern.startswith("!"):
                if fnmatch.fnmatchcase(name, _glob(pattern[1:])):
                    return False
            else:
                found |= fnmatch.fnmatchcase(name, _glob(pattern))
        return found


@dataclass(frozen=True)
class KnownHosts:
    """All entries of a person's known_hosts files."""

    lines: tuple[Line, ...] = ()

    def keys_of(self, host: str, port: int = 22) -> tuple[HostKey, ...]:
        """The keys pinned for a host."""
        name = lookup_name(host, port)
        return tuple(line.key for line in self.lines if not line.marker and line.covers(name))

    def revoked(self, host: str, key: HostKey, port: int = 22) -> bool:
        """Whether the key is marked as one that must not be trusted."""
        name = lookup_name(host, port)
        return any(line.marker == "@revoked" and line.key == key and line.covers(name) for line in self.lines)


def lookup_name(host: str, port: int) -> str:
    """How known_hosts writes a host at a port."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def read_known_hosts(files: Iterable[Path]) -> KnownHosts:
    """The entries of all files that are there; lines that are no entries are passed over, as OpenSSH does."""
    lines: list[Line] = []
    for file in files:
        try:
            if file.stat().st_size > MAX_BYTES:
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines += [entry for line in text.splitlines() if (entry := parse_line(line)) is not None]
    return KnownHosts(tuple(lines))


def parse_line(line: str) -> Line | None:
    """One line of known_hosts, None for comments and for what is no entry."""
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked", "@cert-authority"):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return Line(tuple(words[0].split(",")), HostKey(words[1], blob), marker)


def pin(file: Path, host: str, keys: Sequence[HostKey], *, port: int = 22) -> None:
    """Append keys for a host to a known_hosts file, made (0600, folder 0700) when it is not there."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = lookup_name(host, port)
    added = "".join(f"{name} {key.kind} {base64.b64encode(key.blob).decode()}\n" for key in keys)
    handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "rb+") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            added = "\n" + added
        stream.write(added.encode())  # O_APPEND: one write, so that two of us do not mix their lines


def _glob(pattern: str) -> str:
    """OpenSSH knows only '*' and '?': brackets stand for themselves."""
    return pattern.lower().replace("[", "[[]")


def _hash_matches(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        expected = base64.b64decode(digest)
        found = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(found, expected)
