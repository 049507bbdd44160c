"""What is written as YAML is read back unchanged, by any YAML reader."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.files import _block, read_yaml, write_yaml

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
