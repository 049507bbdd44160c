"""A device class that a person names works everywhere, and a part of a GPU has its share of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster, load_cluster, save_cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.units import GiB, parse_rate
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.own_hardware import own_classes, with_own
from hetctl.trainer.planning.pools import read_pools

FILE = """
schema_version: 1
devices:
  gaudy:
    vendor: amd
    tflops: 200
    memory: 64GiB
    bandwidth: 2TB/s
    nic: 400Gb/s
    price: 3.5
    names: [Instinct GAUDY]
  a100x: {like: a100, nic: 100GbE, names: [A100X]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", "--json", "--model", "llama-1b", *words])
    if isinstance(result.exception, HetctlError):
        raise result.exception
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_the_classes_of_the_seed_are_known() -> None:
    assert plan("--emulate", "a40:8,a100:8")["model"] == "llama-1b"


def test_a_file_beside_the_cluster_makes_classes_known(here: Path) -> None:
    (here / "hardware.yaml").write_text(FILE)
    plan("--emulate", "gaudy:4,a100x:4")
    gaudy, like = own_classes(None)
    assert (gaudy.sustained_tflops, gaudy.memory_bytes, gaudy.memory_bytes_per_s) == (200, 64 * GiB, 2e12)
    assert (gaudy.nic_bytes_per_s, gaudy.price_per_hour) == (50e9, 3.5)
    assert (like.vendor, like.peak_tflops, like.nic_bytes_per_s) == ("nvidia", CLASSES["a100"].peak_tflops, 12.5e9)
    table = CLASSES.with_own((gaudy, like))
    assert table.of_gpu("amd", ["AMD Instinct GAUDY OAM"]) is gaudy
    assert table.of_gpu("nvidia", ["NVIDIA A100X"], "10de:20b8") is like


def test_options_come_last_and_change_only_what_they_say(here: Path) -> None:
    (here / "hardware.yaml").write_text(FILE)
    [gaudy, _, a40] = own_classes(None, ["gaudy=tflops:100", "a40=price:1.2"])
    assert (gaudy.sustained_tflops, gaudy.memory_bytes) == (100, 64 * GiB)
    assert (a40.price_per_hour, a40.peak_tflops) == (1.2, CLASSES["a40"].peak_tflops)


def test_a_cluster_file_keeps_what_was_said_and_older_digests_hold(here: Path) -> None:
    plain = describe_cluster(parse_spec("h200:1", CLASSES), CLASSES)
    assert with_own(plain, own_classes(None, ["gaudy=like:a100"])).digest == plain.digest  # it has none of those
    table = CLASSES.with_own(own_classes(None, ["gaudy=like:a100,tflops:50"]))
    cluster = with_own(describe_cluster(parse_spec("gaudy:2", table), table), tuple(table.values()))
    save_cluster(here / "cluster.yaml", cluster)
    again: Cluster = load_cluster(here / "cluster.yaml")
    assert again.digest == cluster.digest
    assert read_pools(again)[0].rates.flops_per_s == 50e12


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("foo", "is not NAME=key:value"),
        ("foo=tflops", "is not NAME=key:value"),
        ("foo=vendor:amd,tflops:10", "nothing is said of its memory, bandwidth"),
        ("foo=vendor:acme,like:a100", "'acme' is no vendor"),
        ("foo=like:nothing", "'nothing' is not a device class"),
        ("a40=speed:10", "unknown key 'speed'"),
        ("a40=tflops:-3", "tflops must be above zero"),
        ("a40=nic:fast", "'fast' is not a rate"),
    ],
)
def test_what_is_said_wrongly_is_refused(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own_classes(None, [device])


def test_an_unknown_class_says_how_to_make_it_known() -> None:
    with pytest.raises(ConfigError) as error:
        plan("--emulate", "foo:8,a100:8")
    assert "--device NAME=vendor:" in error.value.hint


@pytest.mark.parametrize(
    ("label", "compute", "memory"),
    [
        ("mi300x/cpx", 1 / 8, 24 * GiB),
        ("mi300x/dpx", 1 / 2, 96 * GiB),
        ("mi300a/cpx", 1 / 6, 128 * GiB // 6),
        ("a100/3g.40gb", 3 / 7, 40 * GiB),
        ("h100/1g.10gb+me", 1 / 7, 10 * GiB),
        ("a30/2g.12gb", 2 / 4, 12 * GiB),
    ],
)
def test_a_part_of_a_gpu_has_its_share(label: str, compute: float, memory: int) -> None:
    whole, part = CLASSES[label.partition("/")[0]], CLASSES[label]
    assert part.sustained_tflops == pytest.approx(compute * whole.sustained_tflops)
    assert part.memory_bytes == memory
    assert part.memory_bytes_per_s == pytest.approx(whole.memory_bytes_per_s * memory / whole.memory_bytes)
    if "+" not in label:  # which joins classes of one island
        assert plan("--emulate", f"{label}:4,h200:1")["model"] == "llama-1b"


@pytest.mark.parametrize("label", ["a100/cpy", "mi300x/3g.40gb", "l40s/1g.5gb", "a100/cpx", "mi300x/tpx", "a100/"])
def test_what_is_no_part_of_a_gpu_is_refused(label: str) -> None:
    with pytest.raises(ConfigError, match="is not a device class"):
        plan("--emulate", f"{label}:4")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GbE", 3.125e9), ("400Gb/s", 50e9), ("696GB/s", 696e9), ("1.5TB/s", 1.5e12), (1e9, 1e9), ("200 Gbit/s", 25e9)],
)
def test_rates_as_people_write_them(text: str | float, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "0GB/s", "25G", "GB/s", "-1GB/s", "nan"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_rate(text)
