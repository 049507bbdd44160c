"""torchft over islands: groups that are made anew at each quorum, and a run that goes on without a lost replica."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hetctl.process import ROOT

FOLDER = str(ROOT / "build" / "torchft")
pytestmark = pytest.mark.skipif(
    PathFinder.find_spec("torchft", [FOLDER]) is None, reason="no torchft: `make build/torchft` installs it"
)


@pytest.fixture
def torchft(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importable here, and not for what else runs in this process."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("torchft", "opentelemetry", "google"):
            del sys.modules[name]


class Replicas:
    """Three replicas as threads of this process, in islands by their rank: 0 | 1, 2."""

    def __init__(self) -> None:
        from tests.torch_suite.torchft_over_het import Placed

        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.groups = [Placed(timeout=timedelta(seconds=30)) for _ in range(3)]
        self._pool = ThreadPoolExecutor(3)

    def each(self, call: Callable[[int, Any], Any], ranks: int = 3) -> list[Any]:
        futures = [self._pool.submit(call, rank, self.groups[rank]) for rank in range(ranks)]
        return [future.result() for future in futures]

    def configure(self, quorum: int, ranks: int) -> None:
        address = f"localhost:{self.store.port}/torchft/{quorum}/0"
        self.each(lambda rank, group: group.configure(address, str(rank), rank, ranks), ranks)


def total(rank: int, group: Any) -> float:
    value = torch.tensor([float(rank + 1)])
    group.allreduce([value], dist.ReduceOp.SUM).wait()
    return value.item()


def test_each_quorum_has_a_group_of_its_own_and_leaves_no_thread(torchft: None) -> None:
    replicas, counts = Replicas(), []
    for quorum, ranks in enumerate([3, 2, 3, 3, 2, 3]):
        replicas.configure(quorum, ranks)
        assert replicas.each(total, ranks) == [float(sum(range(1, ranks + 1)))] * ranks
        counts.append((ranks, threading.active_count()))
    assert counts[-1][1] <= counts[0][1]
    replicas.each(lambda rank, group: group.shutdown())
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("het")] == []


def test_an_abort_ends_what_the_others_wait_for(torchft: None) -> None:
    replicas = Replicas()
    replicas.configure(0, 3)

    def call(rank: int, group: Any) -> str:
        if rank == 2:
            group.abort()
            return "left"
        with pytest.raises(RuntimeError) as ended:
            total(rank, group)
        return str(ended.value)

    said = replicas.each(call)
    assert all("rank 2" in text for text in said[:2]), said
    replicas.configure(1, 2)
    assert replicas.each(total, 2) == [3.0, 3.0]
    replicas.each(lambda rank, group: group.shutdown(), 2)


def test_islands_named_alike_by_unlike_replicas_are_refused(torchft: None) -> None:
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.torchft import _meet

    store = dist.HashStore()
    store.set("1", '{"island": ["rack", "amd", "nccl"], "host": ""}')
    with pytest.raises(ConfigError, match="replicas 0 and 1 both name island 'rack'"):
        _meet(store, {"island": ["rack", "cpu", "gloo"], "host": ""}, 0, 2)


@pytest.mark.slow
def test_training_goes_on_without_a_lost_replica_and_takes_it_back(torchft: None, tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    path = os.pathsep.join([str(ROOT), FOLDER])
    told = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "PYTHONPATH": path}

    def start(name: str, dies: int = 0) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "hetctl", "run", "--emulate", "cpu:1", "--", "python"]
        argv += [str(ROOT / "tests" / "programs" / "torchft_replica.py"), name, str(dies), str(tmp_path / name)]
        return subprocess.Popen(argv, cwd=ROOT, env=told, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    staying, lost = [start("a"), start("b")], start("c", dies=5)
    lost.communicate(timeout=120)
    assert lost.returncode != 0
    again = start("c")
    said = [one.communicate(timeout=200)[0] for one in (*staying, again)]
    lighthouse.shutdown()
    assert [one.returncode for one in (*staying, again)] == [0, 0, 0], said
    wrote = [json.loads((tmp_path / name).read_text()) for name in "abc"]
    assert len({one["weights"] for one in wrote}) == 1
    assert set(wrote[0]["took part"]) >= {2, 3}
