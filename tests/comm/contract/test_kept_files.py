"""Files that people edit say whether they did, and what replaces them keeps the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_yaml
from hetctl.comm.contract.kept_files import refuse_edited, was_edited, write_stamped


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_stamped(tmp_path / "a.yaml", {"a": 1}, header="A file.")
    return tmp_path / "a.yaml"


def test_a_file_as_it_was_written_may_be_replaced(file: Path) -> None:
    assert read_yaml(file, what="file") == {"a": 1}
    assert not was_edited(file)
    refuse_edited(file, force=False)
    refuse_edited(file.with_name("absent"), force=False)


@pytest.mark.parametrize("edit", [lambda text: text + "b: 2\n", lambda text: "a: 1\n", lambda text: ""])
def test_an_edited_file_is_refused_and_so_is_one_that_no_digest_speaks_for(file: Path, edit: object) -> None:
    assert callable(edit)
    file.write_text(edit(file.read_text()))
    with pytest.raises(ConfigError, match="somebody may have edited it") as caught:
        refuse_edited(file, force=False)
    assert "--force" in caught.value.hint
    assert "a.yaml.bak" in caught.value.hint
    refuse_edited(file, force=True)


def test_the_old_one_is_kept_unless_it_is_the_same(file: Path) -> None:
    before = file.read_text()
    assert write_stamped(file, {"a": 1}, header="A file.", keep=True) is None
    assert write_stamped(file.with_name("absent"), {"a": 2}, header="A file.", keep=True) is None
    kept = write_stamped(file, {"a": 2}, header="A file.", keep=True)
    assert kept == file.with_name("a.yaml.bak")
    assert kept.read_text() == before
    assert file.read_text() != before


def test_what_somebody_edited_is_never_replaced_by_what_nobody_did(file: Path) -> None:
    edited = file.read_text() + "b: 2  # mine\n"
    file.write_text(edited)
    for n in (2, 3, 4):  # the first with --force
        write_stamped(file, {"a": n}, header="A file.", keep=True)
    assert file.with_name("a.yaml.bak").read_text() == edited
    assert read_yaml(file.with_name("a.yaml.bak.1"), what="file") == {"a": 3}
    assert not file.with_name("a.yaml.bak.2").exists()
