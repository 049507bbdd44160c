"""A host that is lost in the middle of a run: named, or planned around, or refused where only it held the shards."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SETTINGS = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "checkpoint.every=10")
SETTINGS = (*SETTINGS, "train.steps=120", "train.timeout_s=15")


def start(rig: netns.Rig, folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    words = [w for key in SETTINGS for w in ("--set", key)]
    argv = command("train", "--cluster", "cluster.yaml", "--run-dir", name, "--max-restarts", "2", *words, *more)
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=environment(rig), text=True, stdout=pipe, stderr=subprocess.STDOUT)


def await_steps(run: Path, count: int) -> None:
    until = time.monotonic() + 240
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < count:
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def lose(host: netns.RigHost) -> None:
    """Both of its cables go down for good."""
    for cable in ("v", "r0v"):
        name = f"{host.namespace[:-2]}{cable}{host.namespace[-1]}"
        subprocess.run(["ip", "link", "set", name, "down"], check=True)


def summary_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return document


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_from_the_shared_checkpoint(tmp_path: Path) -> None:
    with netns.hosts(2, tmp_path / "rig", rails=1) as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1),)}, tmp_path / "cluster.yaml")
        process = start(rig, tmp_path, "run", "--allow-missing")
        await_steps(tmp_path / "run", 20)
        lose(rig.hosts[1])
        said, _ = process.communicate(timeout=400)
        lost = rig.hosts[1].name
    assert process.returncode == 0, said
    assert f"going on without {lost}" in said
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["restarts"], list(summary["missing_hosts"])) == ("done", 1, [lost])
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 121))
    assert steps.count(1) == 1, "it began again at the checkpoint"


@pytest.mark.slow
def test_a_lost_host_is_named_and_only_copies_replace_its_shards(tmp_path: Path) -> None:
    """Three runs on hosts that share nothing: one insists on its hosts, one has none of their copies, one has."""
    mine = tmp_path / "mine"
    mine.mkdir()
    specs = [netns.HostSpec(hide=(str(mine),)) for _ in range(2)]
    with netns.hosts(specs, tmp_path / "rig", rails=1) as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1),)}, mine / "cluster.yaml")
        strict = start(rig, mine, "strict")
        lenient = start(rig, mine, "lenient", "--allow-missing", "--set", "checkpoint.store=replicate:1")
        copied = start(rig, mine, "copied", "--allow-missing")
        runs = {"strict": strict, "lenient": lenient, "copied": copied}
        for name in runs:
            await_steps(mine / name, 20)
        lose(rig.hosts[1])
        said = {name: p.communicate(timeout=400)[0] for name, p in runs.items()}
        lost = rig.hosts[1].name
    assert strict.returncode == 4, said["strict"]
    silent, no_route = f"{lost}: no answer", f"{lost}: there is no way to {lost}"  # how long its neighbour is known
    assert silent in said["strict"] or no_route in said["strict"]
    assert lenient.returncode == 1, said["lenient"]
    assert f"going on without {lost}" in said["lenient"]
    assert "is gone" in summary_of(mine / "lenient")["failure"]
    assert "put right first" in said["lenient"]
    assert copied.returncode == 0, said["copied"]
    assert "checkpoint.store=auto is replicate:2" in said["copied"]
    summary = summary_of(mine / "copied")
    assert (summary["status"], summary["restarts"], list(summary["missing_hosts"])) == ("done", 1, [lost])
    steps = [json.loads(line)["step"] for line in (mine / "copied" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 121))
    assert steps.count(1) == 1, "it began again at the checkpoint"
