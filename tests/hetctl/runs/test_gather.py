"""Hosts that share no folder, and one that keeps all shards: what it has is a whole checkpoint, exported there."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.trainer.model.config import config_of, find_shape
from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SETTINGS = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "train.steps=3")
# with one stage a host, each host's ranks write what the other ones do not hold
SETTINGS = (*SETTINGS, "parallelism.pipeline=2", "parallelism.data=1")


@pytest.mark.slow
def test_the_host_that_gathers_shards_has_all_that_an_export_needs(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    specs = [netns.HostSpec(hide=(str(mine),)) for _ in range(2)]
    with netns.hosts(specs, tmp_path / "rig", rails=1) as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1),)}, mine / "cluster.yaml")
        settings = (*SETTINGS, f"checkpoint.store=gather:{rig.hosts[1].name}")
        words = [w for key in settings for w in ("--set", key)]
        argv = command("train", "--cluster", "cluster.yaml", "--run-dir", "run", *words)
        done = subprocess.run(argv, cwd=mine, env=environment(rig), text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((mine / "run" / "summary.json").read_text())
        folders = [next((h.folder / "home").glob(".local/state/hetctl/runs/*/*")) for h in rig.hosts]
        outcomes = []
        for number, folder in enumerate(folders):
            argv = command("export", str(folder), "--to", str(tmp_path / f"model{number}"), "--json")
            outcomes.append(subprocess.run(argv, env=environment(rig), text=True, capture_output=True))
        flatter = replace(find_shape("demo"), name="flatter", layers=find_shape("demo").layers - 1)
        (mine / "config.json").write_text(json.dumps(config_of(flatter, dtype="float32")))
        argv = command(
            "train",
            "--cluster",
            "cluster.yaml",
            "--run-dir",
            "run",
            "--model",
            "config.json",
            "--set",
            "data.source=python-stdlib",
            *words,
        )
        kept = [(mine / "run" / name).read_bytes() for name in ("recipe.yaml", "plan.yaml")]
        known = subprocess.run(argv, cwd=mine, env=environment(rig), text=True, capture_output=True)
        assert kept == [(mine / "run" / name).read_bytes() for name in ("recipe.yaml", "plan.yaml")]
        (mine / "run" / "recipe.yaml").unlink()  # as on another machine that launches
        other = subprocess.run(argv, cwd=mine, env=environment(rig), text=True, capture_output=True)
    assert outcomes[1].returncode == 0, outcomes[1].stderr
    document = json.loads(outcomes[1].stdout)
    assert (document["step"], document["parameters"]) == (3, summary["parameters"])
    assert outcomes[0].returncode == 2
    assert "other hosts keep their shards" in outcomes[0].stderr
    assert known.returncode == 2  # by what the run began with, before anything is replaced
    assert "is of another model than" in known.stderr
    assert other.returncode == 1  # no host has it all, so its ranks looked
    assert "is of another model than" in other.stderr
