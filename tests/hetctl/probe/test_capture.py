"""Captures: what identifies is gone, what discovery reads is the same, and hostile archives are refused."""

from __future__ import annotations

import gzip
import io
import ipaddress
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.facts import HostFacts
from hetctl.comm.contract.values import encode
from hetctl.probe import parse
from hetctl.probe import remote as program
from hetctl.probe.capture import Recording, read_capture, write_capture
from hetctl.probe.masking import CaptureMasker
from hetctl.probe.raw import Options, Raw, load
from hetctl.probe.wanted import request
from tests.rigs.dress import Costume, dress_host

SALT = b"fixed"
# Any address, and often one beside a block with a meaning (192.x, 172.x, 100.x, 169.x).
FIRST = st.integers(0, 255) | st.sampled_from([192, 172, 100, 169])
V4 = st.tuples(FIRST, st.integers(0, 2**24 - 1)).map(lambda pair: ipaddress.IPv4Address((pair[0] << 24) + pair[1]))


def raw_of(folder: Path, costume: Costume) -> Raw:
    dress = dress_host(folder, costume)
    return load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    found = []
    for number, (vendor, driver) in enumerate([("nvidia", "mlx5_core"), ("amd", "bnxt_en")]):
        name = f"{vendor}-atlas-{number}.corp.example"
        costume = Costume(name, number, vendor, fabric="roce", nic_driver=driver, gpus=2, nics=2, tool_delay_s=0)  # type: ignore[arg-type]
        found.append(Recording(name, raw_of(tmp_path_factory.mktemp(vendor), costume), address="192.168.7.9"))
    found.append(Recording("dead-host", None, "unreachable", "dead-host (192.168.7.10) refused the connection"))
    return found


def test_nothing_that_identifies_is_left(tmp_path: Path, recordings: list[Recording]) -> None:
    path = tmp_path / "out.tgz"
    write_capture(path, recordings, salt=SALT)
    text = gzip.decompress(path.read_bytes()).decode()
    told = ["atlas", "corp.example", "dead-host", "192.168.7.", "GPU-00000000-0000-4000", "16500240", "69252400"]
    told += ["a000000000000101", "A000000000000101", str(0xA000000000000101), "00000000-0000-4000-8000", '"10.0.0.1"']
    told += ["0200:0000:0000:0001", "02:00:00:00:00:01", "0a00:0001"]
    assert [word for word in told if word in text] == []


def test_facts_are_the_same_but_for_identities(tmp_path: Path, recordings: list[Recording]) -> None:
    path = tmp_path / "out.tgz"
    write_capture(path, recordings)
    again = read_capture(path)
    assert [(r.status, r.raw is None) for r in again] == [("ok", False), ("ok", False), ("unreachable", True)]
    assert again[2].reason == f"{again[2].name} ({again[2].reason.split('(')[1].split(')')[0]}) refused the connection"  # type: ignore[union-attr]
    for before, after in zip(recordings[:2], again[:2], strict=True):
        assert before.raw is not None
        assert after.raw is not None
        assert bare(parse(before.raw)) == bare(parse(after.raw))


def bare(facts: HostFacts) -> object:
    """Facts without identities, addresses by the subnets they share."""
    nics = [replace(n, mac=None, guid=None, addresses=(), gids=()) for n in facts.nics]
    gids = [[(g.index, g.type, g.link_local, g.ipv4 is None) for g in n.gids] for n in facts.nics]
    gpus = [replace(g, uuid=None, serial=None) for g in facts.gpus]
    identified = [bool(g.uuid) for g in facts.gpus], [bool(g.serial) for g in facts.gpus]
    system = replace(facts.system, hostname=None, machine_id=None, boot_id=None, user=None, addresses=None)
    rest = replace(facts, nics=tuple(nics), gpus=tuple(gpus), system=system, interpreters=())
    return encode(rest), gids, identified


def test_one_value_has_one_mask_on_all_hosts(tmp_path: Path, recordings: list[Recording]) -> None:
    write_capture(tmp_path / "out.tgz", recordings, salt=SALT)
    hosts = [parse(r.raw) for r in read_capture(tmp_path / "out.tgz") if r.raw]
    networks = [[ipaddress.ip_interface(f"{n.addresses[0].ip}/24").network for n in h.nics[:2]] for h in hosts]
    assert networks[0] == networks[1]  # rail i of both hosts on one subnet
    assert networks[0][0] != networks[0][1]
    for host in hosts:
        for nic in host.nics[:2]:
            assert {g.ipv4 for g in nic.gids if g.ipv4} == {nic.addresses[0].ip}
    uuid = {g.uuid for h in hosts for g in h.gpus}
    assert len(uuid) == 4


@given(a=V4, b=V4)
def test_masks_keep_exactly_the_shared_prefix(a: ipaddress.IPv4Address, b: ipaddress.IPv4Address) -> None:
    masker = CaptureMasker([], SALT)
    if not any(x.is_loopback or x.is_unspecified or x.is_link_local or int(x) == 2**32 - 1 for x in (a, b)):
        assert shared(a, b) == shared(masker.ipv4(a), masker.ipv4(b))


def shared(a: ipaddress.IPv4Address, b: ipaddress.IPv4Address) -> int:
    return 32 - (int(a) ^ int(b)).bit_length()


@given(a=V4)
def test_masks_keep_the_kind_of_address(a: ipaddress.IPv4Address) -> None:
    masked = CaptureMasker([], SALT).ipv4(a)
    assert (a.is_loopback, a.is_link_local, a.is_multicast) == (
        masked.is_loopback,
        masked.is_link_local,
        masked.is_multicast,
    )
    for block in map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")):
        assert (a in block) == (masked in block)


@given(text=st.text())
def test_masking_never_fails(text: str) -> None:
    masker = CaptureMasker(["node01"], SALT)
    masker.learn_texts([("/serial_number", text), ("tool", text)])
    masker.learn("user", [text])
    masker.text(text)


def test_versions_and_pci_addresses_stay() -> None:
    text = "driver 570.124.06 vbios 96.00.99.00.01 at 0000:18:00.0, kernel 5.15.0-105-generic, std::map 12:30:45 ::1"
    assert CaptureMasker(["node"], SALT).text(text) == text


def test_a_host_named_like_a_format_does_not_break_it(tmp_path: Path) -> None:
    raw = raw_of(tmp_path, Costume(name="gpu", vendor="amd", gpus=1, nics=0, tool_delay_s=0))
    write_capture(tmp_path / "o.tgz", [Recording("gpu", raw)])
    (again,) = read_capture(tmp_path / "o.tgz")
    assert again.raw is not None
    assert again.name == "host-001"
    assert parse(again.raw).gpus[0].name == "AMD Instinct MI325X"
    assert parse(again.raw).system.hostname == "host-001"


def archive(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, "/etc/passwd"
            out.addfile(info, io.BytesIO(content))
    return path


ENTRY = {"name": "a", "file": "hosts/0000.json"}


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({}, "no manifest"),
        ({"../evil": b"x"}, "no capture holds"),
        ({"/etc/cron.d/x": b"x"}, "no capture holds"),
        ({"manifest.json": b"["}, "not JSON"),
        ({"manifest.json": b"[" * 100_000}, "not JSON"),
        ({"manifest.json": b'{"schema_version": 1}'}, "hosts"),
        ({"manifest.json": b'{"schema_version": 9, "hosts": []}'}, "schema_version 9"),
        ({"manifest.json": json.dumps({"schema_version": 1, "hosts": [ENTRY]}).encode()}, "missing"),
        (
            {"hosts/0000.json": b"{}", "manifest.json": json.dumps({"schema_version": 1, "hosts": [ENTRY]}).encode()},
            "another version",
        ),
        ({"hosts/0000.json": b"0" * (17 * 2**20)}, "too large"),
    ],
)
def test_hostile_archives_are_named(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_capture(archive(tmp_path / "x.tgz", members))


def test_links_in_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no capture holds"):
        read_capture(archive(tmp_path / "x.tgz", {"manifest.json": b""}, tarfile.SYMTYPE))


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetctl.probe.capture.MAX_TOTAL_BYTES", 2**20)
    members = {f"hosts/{i:04d}.json": b" " * 2**19 for i in range(8)}
    with pytest.raises(ConfigError, match="unpacks to more"):
        read_capture(archive(tmp_path / "x.tgz", members))


@given(content=st.binary())
def test_any_file_is_a_capture_or_named(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for payload in (content, gzip.compress(content)):
        path = tmp_path_factory.getbasetemp() / "any.tgz"
        path.write_bytes(payload)
        with pytest.raises(ConfigError):
            read_capture(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no capture at"):
        read_capture(tmp_path / "none.tgz")
