"""Several NICs a host: each rank's bridge takes those near its device, and only where the other end is reached."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import save_cluster
from tests.rigs import netns
from tests.rigs.cluster import command, environment, with_nics, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
MB = 1_000_000
# rank 0 and rank 1 each move 48 MB of their sums across; the bytes that the NICs of this host sent are theirs then
PROGRAM = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("het")
data = torch.ones(6_000_000)
for _ in range(4):
    dist.all_reduce(data)
print("NICS", os.environ["RANK"], os.environ.get("HETCTL_NICS"), flush=True)
assert data[0] == 3.0 ** 4
dist.destroy_process_group()
"""


def sent(host: netns.RigHost, nic: str) -> int:
    return int(host.run("cat", f"/sys/class/net/{nic}/statistics/tx_bytes").stdout)


@pytest.mark.slow
def test_each_rank_takes_the_nics_near_its_device_and_shares_out_the_others(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(PROGRAM)
    with netns.hosts(2, tmp_path / "rig", rails=4) as rig:
        cluster = write_cluster(rig, {"h200": ((0, 2),), "mi325x": ((1, 1),)}, tmp_path / "cluster.yaml")
        hosts = tuple(
            with_nics(cluster.host_by_name[h.name], h, reached=range(reached), near=lambda d: (d,))
            for h, reached in zip(rig.hosts, (4, 3), strict=True)
        )
        save_cluster(tmp_path / "cluster.yaml", replace(cluster, hosts=hosts))
        before = [sent(rig.hosts[0], f"rail{r}") for r in range(4)]
        argv = command("run", "--cluster", "cluster.yaml", "--run-dir", "run", "--", "python", "sums.py")
        done = subprocess.run(argv, cwd=tmp_path, env=environment(rig), text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        moved = [sent(rig.hosts[0], f"rail{r}") - b for r, b in enumerate(before)]
    said = done.stdout + done.stderr
    assert "NICS 0 rail0@net0,rail2@net2" in said
    assert "NICS 1 rail1@net1" in said
    assert "NICS 2 rail0@net0,rail1@net1,rail2@net2" in said
    assert 44 * MB < moved[1] < 60 * MB  # the second rank's, all of it
    assert moved[0] > 20 * MB  # the first one's, half each; the store's and gloo's own bytes go there as well
    assert 20 * MB < moved[2] < 32 * MB
    assert moved[3] < MB  # nothing of the other island is there
