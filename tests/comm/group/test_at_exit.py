"""A process that ends with operations under way keeps its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetctl.comm.contract import variables
from hetctl.comm.contract.placement import PlacedBridge
from tests.comm.spawn import placement_of

PROGRAM = """
import sys, torch, torch.distributed as dist
from hetctl.comm.group.autoload import register
register()
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("het", rank=rank, world_size=2, store=dist.FileStore(folder + "/store", 2))
dist.all_reduce(torch.ones(200_000))
works = [dist.all_reduce(torch.ones(500_000), async_op=True) for _ in range(8)]
works.append(dist.irecv(torch.zeros(5), 1 - rank))
raise SystemExit(3)
"""


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_an_exit_with_collectives_under_way_is_no_abort(tmp_path: Path, way: str) -> None:
    placement = placement_of((1, 1), bridges=(PlacedBridge(("island0", "island1"), way),))  # type: ignore[arg-type]
    (tmp_path / "placement.json").write_text(placement.to_json())
    environment = os.environ | {variables.PLACEMENT: str(tmp_path / "placement.json")}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(240) for rank in ranks] == [3, 3]
