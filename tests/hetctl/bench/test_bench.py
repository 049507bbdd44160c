"""`hetctl bench`: one document with every way between two emulated islands, layers, and refusals before ranks start."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hetctl.app import app
from hetctl.bench import bridge, classes, ops, pipeline, published
from hetctl.comm.contract.errors import ConfigError
from hetctl.commands.options import RunOptions
from hetctl.commands.resolve import resolve
from hetctl.console import Sink
from hetctl.trainer.planning.profile import load_profile

ROOT = Path(__file__).parents[3]


def bench(*argv: str, what: str = "bridge") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetctl", "bench", what, *argv]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=400, check=False)


def test_a_bridge_is_measured_beside_native_and_raw_ways() -> None:
    done = bench("--max-size", "8KiB", "--bridge", "shm", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["ways"]) == ["native", "shm"]
    assert found["ways"]["shm"]["message_bytes_per_s"]["8192"] > 0
    assert all(way["exact"] == {"sums": 8, "messages": 8, "wrong": []} for way in found["ways"].values())
    assert found["ways"]["native"]["host_bytes_per_gb"] is None  # nobody counts them there
    assert "8 gloo groups" in found["raw_bytes_per_s"]
    assert "1 KiB p99" in done.stderr


@pytest.mark.parametrize(
    ("what", "argv"),
    [
        ("bench_bridge", ("bridge", "-o")),
        ("bench_ops", ("ops", "-o")),
        ("bench_classes", ("ops", "--cluster", "cluster.yaml", "-o")),
        ("bench_published", ("published", "-o")),
    ],
)
@pytest.mark.parametrize("there", ["folder", "damaged"])
def test_where_nothing_can_be_written_nothing_is_measured(
    what: str, argv: tuple[str, ...], there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bridge, ops, classes, published):
        if hasattr(module, what):
            monkeypatch.setattr(module, what, lambda *_, **__: pytest.fail("it was measured"))
    path = tmp_path / "there"
    if there == "folder" and what != "bench_published":
        path.mkdir()
    else:  # no profile, and no folder to write pages into
        path.write_text("[")
    with pytest.raises((OSError, ConfigError), match="there"):
        app(["bench", *argv, str(path)], standalone_mode=False)


def test_measurements_that_end_at_once_are_all_kept(tmp_path: Path) -> None:
    known, path = load_profile(ROOT / "tests/gpu/predictions/profile.yaml").classes[0], tmp_path / "profile.yaml"
    entries = [replace(known, device_class=f"class-{n}") for n in range(12)]
    with ThreadPoolExecutor(len(entries)) as pool:
        list(pool.map(partial(ops.add_to_profile, path), entries))
    assert {c.device_class for c in load_profile(path).classes} == {e.device_class for e in entries}


@pytest.mark.slow
def test_the_native_way_between_islands_of_one_vendor_is_a_transport(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    done = bench("--emulate", "h200:1,h100:1", "--max-size", "8KiB", "--bridge", "native", "--json", "-o", str(profile))
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["ways"]) == ["native"]
    assert [b.transport for b in load_profile(profile).bridges] == ["native"]


@pytest.mark.slow
def test_a_pipeline_leaves_ranks_idle_that_have_no_sample() -> None:
    argv = ["--emulate", "cpu:2,cpu:1", "--rounds", "1", "--seq-len", "16", "--micro-batches", "2", "--json"]
    done = bench(*argv, what="pipeline")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_s"]["bridged"][0] > 0


def test_a_pipeline_where_no_native_library_spans_the_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "speak_alike", lambda cluster: False)
    asked = RunOptions(emulate="cpu:1,cpu:1", model="demo", seq_len=16, global_batch=2, settings=pipeline.SETTINGS)
    resolved = resolve(asked, Sink(), runs=True)
    found = pipeline.bench_pipeline(resolved.cluster, resolved.recipe, rounds=1, sink=Sink())
    assert set(found["tokens_per_s"]) == {"bridged", "naive"}
    assert found["best_native"] == "bridged"


def test_a_bridge_that_cannot_be_is_refused() -> None:
    done = bench("--bridge", "direct")
    assert done.returncode == 2
    assert "no bridge can be direct here" in done.stderr
    assert bench("--emulate", "h200:2").returncode == 2


@pytest.mark.slow
def test_layers_are_measured_as_a_tensor_groups_part_beside_whole_ones(tmp_path: Path) -> None:
    for degree in ("1", "2"):
        out = str(tmp_path / "p.yaml")
        how = ("--samples", "1", "--seq-len", "64", "--precision", "fp16")
        done = bench("--tensor", degree, *how, "-o", out, "--json", what="ops")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["tensor"], found["speed"], found["precision"]) == (int(degree), 1.0, "fp16")
        assert min(found["block"][0]["forward_s"], found["head"][0]["backward_s"]) > 0
    assert [(c.tensor, c.sums) for c in load_profile(tmp_path / "p.yaml").classes] == [(1, False), (2, True)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--tensor", "3"), "do not divide by 3"),
        (("--at-speed", "0.5"), "can be held to a share of their speed"),
        (("--precision", "tf32"), "cpu cannot multiply tf32"),
    ],
)
def test_layers_that_cannot_be_measured_are_refused(argv: tuple[str, str], said: str, tmp_path: Path) -> None:
    done = bench(*argv, "--samples", "1", "-o", str(tmp_path / "p.yaml"), what="ops")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "p.yaml").exists()
