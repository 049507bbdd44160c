"""Nothing that identifies is left in a bundle, whatever file it stood in; what does not identify stays readable."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.probe.masking import ReportMasker
from hetctl.validate.bundle import MAX_FILE_BYTES, check_target, masked_files, write_bundle
from hetctl.validate.identities import masker_for
from tests.hetctl.validate import hostile


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.evidence(folder / "evidence")
    environment = {"WANDB_API_KEY": hostile.SECRET, "HOME": "/home/" + hostile.USERS[0], "EDITOR": "vi"}
    masker = masker_for(hostile.ground(), environment=environment)
    documents = {"report.json": {"mars": hostile.LINE, "n": 3}, "report.md": hostile.LINE}
    write_bundle(folder / "out.tgz", masked_files(documents, folder / "evidence", masker))
    with tarfile.open(folder / "out.tgz") as archive:
        archive.extractall(folder / "out", filter="data")
    return folder / "out"


@pytest.mark.parametrize("original", hostile.ORIGINALS)
def test_a_grep_of_the_unpacked_bundle_finds_no_original(unpacked: Path, original: str) -> None:
    found = subprocess.run(["grep", "-raliF", "--", original, str(unpacked)], capture_output=True, text=True)
    assert found.returncode == 1, f"'{original}' stands in {found.stdout}"
    assert not [p for p in unpacked.rglob("*") if original.lower() in p.name.lower()]


def test_the_fixture_holds_every_original(tmp_path: Path) -> None:
    """Otherwise the test above would find nothing because there is nothing."""
    hostile.evidence(tmp_path)
    text = (tmp_path / "bridge.tcp" / "log.txt").read_text() + hostile.LINE.lower() + str(hostile.PRIVATE)
    assert [word for word in hostile.ORIGINALS if word.lower() not in text.lower()] == []


def test_what_does_not_identify_stays(unpacked: Path) -> None:
    text = (unpacked / "hetctl-validation/evidence/bridge.tcp/log.txt").read_text()
    assert "NCCL INFO Bootstrap: Using ib0:ip-" in text
    assert "cannot reach ip-" in text
    assert ":29500" in text
    assert not (unpacked / "hetctl-validation/evidence/bridge.tcp/link.txt").exists(), "links lead elsewhere"


def test_the_mapping_is_not_packed_and_members_name_nobody(unpacked: Path) -> None:
    with tarfile.open(unpacked.parent / "out.tgz") as archive:
        members = archive.getmembers()
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
    assert not [m.name for m in members if "mask" in m.name or "mapping" in m.name]


def test_one_value_has_one_placeholder_in_all_files(unpacked: Path) -> None:
    """The host's name, its address and the GID made of that address, wherever they stand."""
    folder = unpacked / "hetctl-validation"
    texts = [p.read_text() for p in folder.rglob("*") if p.is_file() and p.suffix in (".txt", ".log", ".md")]
    firsts = {text.split("]", 1)[0] for text in texts if text.startswith("[host")}
    assert len(firsts) == 1
    masker = ReportMasker()
    assert masker.text(hostile.ADDRESSES[0]) == masker.text(hostile.GID) == "ip-1"
    assert masker.text("10.31.7.43") == "ip-2"


def test_versions_times_and_loopback_are_no_addresses() -> None:
    masker = masker_for(hostile.ground(), environment={})
    for text in (
        "firmware 229.2.52.0",
        "at 12:34:56",
        "127.0.0.1:29500",
        "::1",
        "0000:18:00.0",
        "c10d::Work",
        "1.5e-9",
    ):
        assert masker.text(text) == text
    assert masker.text("tokens_per_s: 19554.12, tokenizer: bytes") == "tokens_per_s: 19554.12, tokenizer: bytes"
    assert masker.text("root@localhost in /root") == "root@localhost in /root"


@given(before=st.text(max_size=12), after=st.text(max_size=12))
def test_a_secret_is_found_whatever_stands_around_it(before: str, after: str) -> None:
    masker = ReportMasker()
    masker.learn("secret", [hostile.SECRET])
    assert hostile.SECRET not in masker.text(before + hostile.SECRET + after)
    assert hostile.SECRET not in masker.text(repr(before + hostile.SECRET + after))


def test_what_only_a_second_tool_names_is_hidden_too(tmp_path: Path) -> None:
    """A bare column of a table: nothing around it says that it is a serial number."""
    (tmp_path / "discovery.gpus").mkdir()
    rows = [{"where": "mars nvidia:0", "what": "serial", "ours": None, "theirs": "1650099", "agrees": None}]
    (tmp_path / "discovery.gpus" / "compared.json").write_text(json.dumps(rows))
    (tmp_path / "discovery.gpus" / "query.txt").write_text("0, NVIDIA H200, 143771 MiB, 1650099\n")
    masker = masker_for(hostile.ground(), evidence=tmp_path, environment={})
    files = masked_files({}, tmp_path, masker)
    assert files["evidence/discovery.gpus/query.txt"] == b"0, NVIDIA H200, 143771 MiB, serial-2\n"
    assert b"1650099" not in b"".join(files.values())


def test_letters_that_pass_for_others() -> None:
    masker = ReportMasker()
    masker.learn("host", ["mars"])
    assert masker.text("MARS mar\u017f marsh") == "host-1 hidden marsh"


@given(text=st.text())
def test_masking_twice_is_masking_once(text: str) -> None:
    masker = ReportMasker()
    once = masker.text(text)
    assert masker.text(once) == once


def test_long_files_keep_beginning_and_end(tmp_path: Path) -> None:
    (tmp_path / "long.log").write_text("first\n" + "x" * (2 * MAX_FILE_BYTES) + "\nlast")
    content = masked_files({}, tmp_path, ReportMasker())["evidence/long.log"]
    assert content.startswith(b"first")
    assert content.endswith(b"last")
    assert len(content) < MAX_FILE_BYTES + 100


def test_where_a_bundle_cannot_go(tmp_path: Path) -> None:
    there = tmp_path / "out.tgz"
    there.write_bytes(b"")
    for path in (there, tmp_path, tmp_path / "nowhere" / "out.tgz"):
        with pytest.raises(ConfigError):
            check_target(path, force=False)
    check_target(there, force=True)
