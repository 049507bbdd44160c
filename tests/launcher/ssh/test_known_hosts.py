"""known_hosts as OpenSSH reads it: plain, hashed, wildcard, negated and revoked entries; pinning."""

from __future__ import annotations

import base64
import hashlib
import hmac
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.launcher.ssh.known_hosts import HostKey, KnownHosts, Line, parse_line, pin, read_known_hosts

KEY = HostKey("ssh-ed25519", b"\x00\x00\x00\x0bssh-ed25519" + bytes(36))
OTHER = HostKey("ssh-ed25519", b"\x00\x00\x00\x0bssh-ed25519" + bytes(35) + b"\x01")


def entry(names: str, key: HostKey = KEY, marker: str = "") -> str:
    return f"{marker} {names} {key.kind} {base64.b64encode(key.blob).decode()} a comment".strip()


def known(*lines: str) -> KnownHosts:
    return KnownHosts(tuple(line for text in lines if (line := parse_line(text)) is not None))


def hashed(name: str, salt: bytes = b"s" * 20) -> str:
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "host", "port", "found"),
    [
        ("node1", "node1", 22, True),
        ("node1", "NODE1", 22, True),
        ("node1", "node10", 22, False),
        ("a,node1,10.0.0.1", "10.0.0.1", 22, True),
        ("node1", "node1", 2222, False),
        ("[node1]:2222", "node1", 2222, True),
        ("[node1]:2222", "node1", 22, False),
        ("node*", "node17", 22, True),
        ("node?", "node17", 22, False),
        ("*,!node17", "node17", 22, False),
        ("*,!node17", "node18", 22, True),
        ("n[1-2]", "n1", 22, False),
        (hashed("node1"), "node1", 22, True),
        (hashed("node1"), "node2", 22, False),
        (hashed("[node1]:2222"), "node1", 2222, True),
        ("|1|broken", "node1", 22, False),
    ],
)
def test_which_names_an_entry_covers(names: str, host: str, port: int, found: bool) -> None:
    assert bool(known(entry(names)).keys_of(host, port)) is found


def test_revoked_keys_and_authorities_are_no_host_keys() -> None:
    files = known(entry("*", OTHER, "@revoked"), entry("*", KEY, "@cert-authority"))
    assert files.keys_of("node1") == ()
    assert files.revoked("node1", OTHER)
    assert not files.revoked("node1", KEY)


@pytest.mark.parametrize(
    "line", ["", "# x y z", "node1 ssh-ed25519", "node1 ssh-ed25519 ***", "@else node1 ssh-ed25519 AAAA"]
)
def test_what_is_no_entry_is_passed_over(line: str) -> None:
    assert parse_line(line) is None


@given(st.text())
def test_any_line_is_an_entry_or_none(line: str) -> None:
    found = parse_line(line)
    assert found is None or isinstance(found, Line)
    if found:
        found.covers("node1")


def test_pinning_appends_and_keeps_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / ".ssh" / "known_hosts"
    pin(file, "Node1", [KEY])
    file.write_text(file.read_text().rstrip("\n"))  # an editor left no newline at the end
    pin(file, "node1", [OTHER], port=2222)
    assert read_known_hosts([file, tmp_path / "absent"]).keys_of("node1") == (KEY,)
    assert read_known_hosts([file]).keys_of("node1", 2222) == (OTHER,)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_fingerprint_has_the_form_that_openssh_prints() -> None:
    assert KEY.fingerprint == "SHA256:" + base64.b64encode(hashlib.sha256(KEY.blob).digest()).decode()[:43]
