"""Slurm with stand-ins for its commands, where its daemons are not installed (test_slurm.py has the real ones)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import (
    Access,
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Member,
    Nic,
    TransportOption,
    save_cluster,
)
from tests.rigs.cluster import ROOT, command

# runs the step here, as the node it was asked for; what it was asked is kept
SRUN = """#!/bin/sh
echo "$@" >> "$0.log"
for word; do shift; case "$word" in --nodelist=*) export SLURMD_NODENAME=${word#*=};; --) break;; esac; done
exec "$@"
"""
SBATCH = """#!/bin/sh
cp "$1" "$0.script"
SLURM_JOB_ID=7 SLURM_JOB_NAME=hetctl-run SLURM_JOB_NODELIST=node[1-2] sh "$1" > "$0.log" 2>&1 &
echo "Submitted batch job 7"
"""
PROGRAM = 'import os; print("from", os.environ["SLURMD_NODENAME"], os.environ["RANK"], flush=True)\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the stand-ins in bin/, a cluster of two nodes that are both this machine, and a program."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("sbatch", SBATCH)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "here.py").write_text(PROGRAM)
    hosts = tuple(
        Host(
            f"node{n}",
            Access(f"node{n}", python=command()[0]),
            f"127.0.0.{n}",
            devices=(Device(0, vendor, name, 1 << 30),),
            nics=(Nic("lo", address=f"127.0.0.{n}"),),
        )
        for n, vendor, name in ((1, "nvidia", "h200"), (2, "amd", "mi325x"))
    )
    islands = tuple(Island(h.devices[0].device_class, h.devices[0].vendor, "net", (Member(h.name, 0),)) for h in hosts)
    links = (IslandLink(("h200", "mi325x"), (TransportOption("tcp", True, "test"),)),)
    save_cluster(tmp_path / "cluster.yaml", Cluster(hosts, islands, links=links, source="emulated", runs="gloo"))
    return tmp_path


def run(site: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(site / "home"),
        **environment,
    }
    argv = command("run", "--cluster", "cluster.yaml", "--run-dir", "run", *words, "--", "python", "here.py")
    return subprocess.run(argv, cwd=site, env=env, text=True, capture_output=True, timeout=400)


def test_inside_an_allocation_each_node_is_a_step(site: Path) -> None:
    done = run(site, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[0] from node1 0", "[1] from node2 1"} <= set(done.stdout.splitlines())
    steps = (site / "bin" / "srun.log").read_text().splitlines()
    assert len(steps) == 2
    assert all("--nodes=1 --ntasks=1" in step for step in steps)


def test_outside_one_the_script_is_shown_and_submitted(site: Path) -> None:
    done = run(site, "--launcher", "slurm", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"] == 7
    assert "#SBATCH --nodelist=node[1-2]" in done.stderr
    assert (site / "bin" / "sbatch.script").read_text() == (site / "run" / "launch" / "sbatch.sh").read_text()
    until = time.monotonic() + 240
    while not (site / "run" / "summary.json").exists():
        assert time.monotonic() < until, (site / "bin" / "sbatch.log").read_text()
        time.sleep(0.1)
    assert json.loads((site / "run" / "summary.json").read_text())["status"] == "done"
