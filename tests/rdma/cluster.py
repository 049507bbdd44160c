"""The two machines as a cluster: really discovered, then told that each holds one GPU of another vendor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hetctl.comm.contract.cluster import Cluster, save_cluster
from hetctl.comm.contract.facts import GpuFacts
from hetctl.discovery.discover import discover
from hetctl.discovery.fabric import build
from hetctl.discovery.inventory import load_inventory
from tests.rdma.vms import ROOT, Pair

INVENTORY = """\
defaults: {python: /usr/bin/python3, exclude_nics: [eth2]}
hosts:
  rig1: {data_address: 10.77.0.1}
  rig2: {data_address: 10.77.0.2}
"""
PROGRAMS = Path(__file__).parent / "programs"
PRODUCTS = (("nvidia", "NVIDIA H200"), ("amd", "AMD Instinct MI325X"))


def inventory_file(machines: Pair) -> Path:
    file = machines.home / "inventory.yaml"
    file.write_text(INVENTORY)
    return file


def environment(machines: Pair, **more: str) -> dict[str, str]:
    """Of the person whose home knows the machines."""
    return {**os.environ, "HOME": str(machines.home), "SSH_AUTH_SOCK": "", "PYTHONPATH": str(ROOT), **more}


def hetctl(machines: Pair, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hetctl", *words]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(machines, **more), cwd=machines.home)


def two_islands(machines: Pair) -> Cluster:
    """What discovery makes of the machines' own facts and a GPU in each; ranks run on CPU."""
    entries = load_inventory(inventory_file(machines)).entries
    with patch.dict(os.environ, {"HOME": str(machines.home), "SSH_AUTH_SOCK": ""}):
        reports = [a.report for a in discover(entries, timeout_s=240)]
    with_gpus = []
    for report, (vendor, product) in zip(reports, PRODUCTS, strict=True):
        assert report.facts is not None, report.reason
        with_gpus.append(replace(report, facts=replace(report.facts, gpus=(GpuFacts(vendor, 0, product),))))
    return replace(build(with_gpus).cluster, source="emulated", runs="gloo")


def save(machines: Pair, cluster: Cluster, *, rails: int, env: Mapping[str, str]) -> Path:
    """The cluster file of a case: with so many of the hosts' NICs, and this in the ranks' environment."""
    hosts = []
    for host in cluster.hosts:
        assert host.access is not None
        hosts.append(replace(host, nics=host.nics[:rails], access=replace(host.access, env=dict(env))))
    file = machines.home / "cluster.yaml"
    save_cluster(file, replace(cluster, hosts=tuple(hosts)))
    return file


def run(
    machines: Pair, file: Path, program: str, *, word: str = "", then: Callable[[], None] = lambda: None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, summary, and what was printed; `then` is done when a line with `word` was."""
    folder = machines.home / f"run-{len(list(machines.home.glob('run-*')))}"
    argv = ["run", "--cluster", str(file), "--run-dir", str(folder), "--verify-bridge", "--bridge", "rdma"]
    said, waiting = [], bool(word)
    with _started(machines, *argv, "--", "python", str(PROGRAMS / program)) as running:
        assert running.stdout
        try:
            for line in running.stdout:
                said.append(line)
                if waiting and word in line:
                    waiting = False
                    then()
        except BaseException:
            running.kill()
            raise
    summary = folder / "summary.json"
    return running.returncode, json.loads(summary.read_text()) if summary.exists() else {}, "".join(said)


def _started(machines: Pair, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hetctl", *words]
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(machines),
        cwd=machines.home,
    )
