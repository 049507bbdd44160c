"""The decoder: what fits comes back equal, what does not is one sentence that names the place."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.cluster import load_cluster, save_cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_yaml, write_atomically
from hetctl.comm.contract.units import parse_bytes
from hetctl.comm.contract.values import decode, encode
from hetctl.trainer.planning.hardware import CLASSES


@dataclass(frozen=True)
class Inner:
    size: int = 1
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    pair: tuple[int, int] = (0, 1)
    many: tuple[Inner, ...] = ()
    choice: Literal["auto"] | int = "auto"
    maybe: str | None = None
    flag: bool = False


@dataclass(frozen=True)
class Words:
    way: Literal["shm", "tcp"] | Literal["auto"] = "auto"
    count: int | Literal["auto"] = "auto"
    counts: tuple[int, ...] | Literal["auto"] = "auto"


def test_words_of_several_kinds_are_named_and_not_their_types() -> None:
    with pytest.raises(ConfigError, match="way: 'tpc' is not one of the known words") as caught:
        decode(Words, {"way": "tpc"}, where="recipe")
    assert caught.value.hint == "did you mean 'tcp'?"
    with pytest.raises(ConfigError, match="count: expected a whole number or auto, found 'two'"):
        decode(Words, {"count": "two"}, where="recipe")
    with pytest.raises(ConfigError, match="counts: expected a list or auto, found 'two'"):
        decode(Words, {"counts": "two"}, where="recipe")


@given(
    st.builds(
        Outer,
        name=st.text(),
        inner=st.builds(Inner, size=st.integers(-(2**63), 2**63), share=st.floats(allow_nan=False)),
        many=st.lists(st.builds(Inner), max_size=3).map(tuple),
        choice=st.just("auto") | st.integers(-(2**63), 2**63),
        maybe=st.none() | st.text(),
        flag=st.booleans(),
    )
)
def test_what_is_encoded_decodes_to_the_same(value: Outer) -> None:
    assert decode(Outer, encode(value), where="x") == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "'name' is missing"),
        ({"name": 3}, "x.name: expected text"),
        ({"name": "a", "inner": {"sise": 1}}, "x.inner: unknown key 'sise'"),
        ({"name": "a", "inner": {"size": True}}, "expected a whole number"),
        ({"name": "a", "inner": {"size": 1.5}}, "expected a whole number"),
        ({"name": "a", "inner": {"share": 10**309}}, "x.inner.share: 1000000"),
        ({"name": "a", "pair": [1]}, "expected 2 entries"),
        ({"name": "a", "many": [{}, 3]}, "x.many[1]"),
        ({"name": "a", "choice": "later"}, "x.choice"),
        ({"name": "a", "flag": 1}, "true or false"),
        ([], "expected keys and values"),
        (None, "found nothing"),
    ],
)
def test_what_does_not_fit_names_the_place(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Outer, data, where="x")
    assert words in caught.value.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_any_plain_data_is_a_value_or_a_config_error(data: Any) -> None:
    with contextlib.suppress(ConfigError):
        decode(Outer, data, where="x")


def test_a_cluster_survives_its_file(tmp_path: Any) -> None:
    cluster = describe_cluster(parse_spec("h200:16,mi325x:4@0.5+mi300x:4~40GiB", CLASSES), CLASSES)
    save_cluster(tmp_path / "cluster.yaml", cluster)
    again = load_cluster(tmp_path / "cluster.yaml")
    assert again == cluster
    assert again.digest == cluster.digest


def test_the_digest_ignores_raw_facts_but_not_devices() -> None:
    from dataclasses import replace

    cluster = describe_cluster(parse_spec("h200:2,mi325x:2", CLASSES), CLASSES)
    probed = replace(cluster, hosts=tuple(replace(h, facts={"free": 1}) for h in cluster.hosts))
    assert probed.digest == cluster.digest
    assert replace(cluster, hosts=cluster.hosts[:1]).digest != cluster.digest


@pytest.mark.parametrize(
    ("text", "value"), [("40GiB", 40 * 2**30), ("16 GB", 16 * 10**9), ("1.5MiB", 3 * 2**19), ("12", 12), (7, 7)]
)
def test_sizes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "3 apples", "0GB", "1e3GB", "9" * 400 + "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_a_failed_write_leaves_the_old_file(tmp_path: Any) -> None:
    path = tmp_path / "a"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["a: !!python/name:os.system", "a: [", "a: b: c", "\x00", "{" * 2000])
def test_yaml_that_is_not_plain(tmp_path: Any, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_yaml(tmp_path / "a.yaml", what="recipe")
