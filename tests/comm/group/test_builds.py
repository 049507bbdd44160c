"""Ranks that cannot work together are refused by name when they meet; islands of unlike builds of torch are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.group import builds
from tests.comm.spawn import on_islands, placement_of


def _meet(rank: int, torches: list[str], codes: list[str], monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(torch, "__version__", torches[rank])
    monkeypatch.setattr(builds, "code_digest", lambda: codes[rank])
    builds.check_builds(store, rank, placement_of((2, 2)))


def test_an_island_has_one_torch_and_the_job_one_hetctl(monkeypatch: pytest.MonkeyPatch) -> None:
    store, same = dist.HashStore(), ["a"] * 4
    versions = ["2.13.0+cu130", "2.13.1+cu130", "2.11.0+rocm7.1", "2.12.0+rocm7.1"]
    for rank in (0, 1, 2):
        _meet(rank, versions, same, monkeypatch, store)
    with pytest.raises(ConfigError, match=r"rank 3 on host3 has torch 2.12.0\+rocm7.1 where rank 2 on host2"):
        _meet(3, versions, same, monkeypatch, store)
    store = dist.HashStore()
    _meet(0, versions, ["a", "b", "a", "a"], monkeypatch, store)
    with pytest.raises(ConfigError, match=r"rank 1 on host1 runs another hetctl \(b\) than rank 0 on host0 \(a\)"):
        _meet(1, versions, ["a", "b", "a", "a"], monkeypatch, store)


def _as_of(rank: int, versions: list[str], meeting: str) -> float:
    """A sum over ranks whose torch says to be of these versions; they were let in before, so they meet anew."""
    dist.destroy_process_group()
    torch.__version__ = versions[rank]
    dist.init_process_group("het", store=dist.FileStore(meeting, 4), rank=rank, world_size=4)
    value = torch.ones(3)
    dist.all_reduce(value)
    return float(value.sum())


def test_islands_of_unlike_torches_sum(tmp_path: Path) -> None:
    between, within = ["2.13.0", "2.13.0", "2.12.0", "2.12.0"], ["2.13.0", "2.12.0", "2.13.0", "2.13.0"]
    assert on_islands((2, 2), _as_of, between, str(tmp_path / "between")) == [12.0] * 4
    with pytest.raises(AssertionError, match="one native group needs one version"):
        on_islands((2, 2), _as_of, within, str(tmp_path / "within"), timeout=5)
