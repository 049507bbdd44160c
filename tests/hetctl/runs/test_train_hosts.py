"""`hetctl train` on six real hosts: unequal, two Pythons, no shared folder, one behind a jump host; the same losses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, other_environment, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "train.validation_samples=8", "optimizer.warmup_steps=2")
ISLANDS = {"h200": ((0, 1), (1, 2)), "mi325x": ((2, 1), (3, 1), (4, 1), (5, 1))}


def train(folder: Path, rig: netns.Rig, *words: str, steps: int) -> subprocess.CompletedProcess[str]:
    settings = [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]
    argv = command("train", *settings, *words)
    return subprocess.run(argv, cwd=folder, env=environment(rig), text=True, capture_output=True, timeout=400)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher's folder, which no host sees."""
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[netns.Rig]:
    specs = [netns.HostSpec(hide=(str(mine),), behind=0 if n == 5 else None) for n in range(6)]
    folder = tmp_path_factory.mktemp("rig")
    with netns.hosts(specs, folder, rails=1) as rig:
        other = other_environment(folder / "second")
        write_cluster(rig, ISLANDS, mine / "cluster.yaml", python={2: other, 5: other})
        yield rig


@pytest.fixture(scope="module")
def trained(rig: netns.Rig, mine: Path) -> Path:
    done = train(mine, rig, "--cluster", "cluster.yaml", "--run-dir", "run", "--set", "checkpoint.every=2", steps=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing of the run is left running" in done.stdout
    assert "note: CPU processes stand for h200, mi325x: the cluster file is an emulation" in done.stderr
    return mine / "run"


@pytest.mark.slow
def test_the_losses_are_those_of_one_machine(trained: Path, rig: netns.Rig, mine: Path) -> None:
    plan = trained / "plan.yaml"
    done = train(mine, rig, "--plan", str(plan), "--run-dir", "alone", steps=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(trained) == pytest.approx(losses(mine / "alone"), rel=1e-5)


def test_what_hosts_hold_and_what_came_back(trained: Path, rig: netns.Rig) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["processes_left"] == 0
    assert not (trained / "checkpoints").exists()
    for host in rig.hosts:
        home = host.folder / "home"
        assert len(list(home.glob(".cache/hetctl/code/*"))) == 1, "one bundle, whole"
        assert len(list(home.glob(".local/state/hetctl/runs/*/*/checkpoints/step-00000004/manifest.json"))) == 1
        assert [p for p in host.pids() if "python" in Path(f"/proc/{p}/comm").read_text()] == []


def test_shards_are_fetched_for_an_export_where_the_run_was_started(trained: Path, rig: netns.Rig, mine: Path) -> None:
    argv = command("export", "run", "--to", "model", "--json")
    done = subprocess.run(argv, cwd=mine, env=environment(rig), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    document, summary = json.loads(done.stdout), json.loads((trained / "summary.json").read_text())
    assert (document["step"], document["parameters"]) == (4, summary["parameters"])
    with safe_open(str(mine / "model" / "model.safetensors"), framework="pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == summary["parameters"]  # noqa: SIM118
    assert not list(trained.glob("fetched-*"))


@pytest.mark.slow
def test_a_run_goes_on_from_shards_on_its_hosts(trained: Path, rig: netns.Rig, mine: Path) -> None:
    for host in rig.hosts:  # as if the run had died between saving on some hosts and on others
        for last in (host.folder / "home").glob(".local/state/hetctl/runs/*/*/checkpoints/step-00000004"):
            if host.name.endswith(("h0", "h3")):
                (last / "manifest.json").unlink()
    before = losses(trained)
    done = train(mine, rig, "--cluster", "cluster.yaml", "--run-dir", "run", steps=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(trained)[4:] == before[2:], "steps 3 and 4 again, to the last digit"


def test_bad_hosts_are_all_named_before_anything_starts(rig: netns.Rig, mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    specs = [netns.HostSpec(), netns.HostSpec(other_key=True), netns.HostSpec()]
    with netns.hosts(specs, folder) as other:
        bare = netns.PYTHON  # a Python without torch
        write_cluster(other, {"h200": ((0, 1),), "mi325x": ((1, 1), (2, 1))}, mine / "bad.yaml", python={2: bare})
        done = train(mine, other, "--cluster", "bad.yaml", "--set", "data.source=/nowhere", steps=2)
        assert done.returncode == 4, done.stderr
        assert "3 of 3 hosts cannot take part" in done.stderr
        assert "it cannot read /nowhere" in done.stderr
        assert "known_hosts" in done.stderr
        assert "has no torch" in done.stderr
        for host in other.hosts:
            assert not list((host.folder / "home").rglob("rank-*.log"))
