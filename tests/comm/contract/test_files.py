"""What is written as YAML is read back unchanged, by any YAML reader."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import _block, read_yaml, write_atomically, write_json, write_yaml

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(["no", "1e3", "a: b"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1), values, max_size=5))
def test_any_plain_data_comes_back(data: object) -> None:
    import yaml

    assert yaml.safe_load("".join(_block(data, ""))) == data


def test_keys_longer_than_readers_take_plainly() -> None:
    import yaml

    long = "k" * 1200
    for data in ({long: 1}, {long: {"a": [1, {"b": long}]}}, {"x": [{long: None, "y": 2}]}):
        assert yaml.safe_load("".join(_block(data, ""))) == data


def test_lists_of_mappings_have_a_line_each(tmp_path: Path) -> None:
    data = {"ranks": [{"rank": 0, "host": "a b"}, {"rank": 1, "host": "h200#2"}], "empty": [], "ahead": [2, 1]}
    write_yaml(tmp_path / "x.yaml", data, header="why")
    text = (tmp_path / "x.yaml").read_text()
    assert text.splitlines() == [
        "# why",
        "ranks:",
        '  - {rank: 0, host: "a b"}',
        "  - {rank: 1, host: h200#2}",
        "empty: []",
        "ahead: [2, 1]",
    ]
    assert read_yaml(tmp_path / "x.yaml", what="test") == data


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_yaml(tmp_path / "a.yaml", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.yaml").stat().st_mode) == mode


def test_a_private_file_is_its_owners_from_the_first_byte_and_halves_of_characters_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(stat.S_IMODE(os.stat(a).st_mode)), replace(a, b)))
    (tmp_path / "a.json").write_text("readable by all")
    write_json(tmp_path / "a.json", {"folder": "donn\udce9es"}, private=True)
    write_atomically(tmp_path / "b", "donn\udce9es")
    assert seen == [0o600, 0o644]
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600
    assert (tmp_path / "b").read_text() == "donn?es"


@pytest.mark.parametrize(("what", "said"), [("inventory", "an inventory"), ("recipe", "a recipe")])
def test_what_a_file_is_no_example_of_has_its_article(tmp_path: Path, what: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=f"not the plain YAML {said} is made of"):
        read_yaml(tmp_path / "a.yaml", what=what)
