"""Sums and messages are found exact where they are, and one wrong value in millions is found where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bench import exact
from hetctl.comm.contract.placement import current_placement
from tests.comm.spawn import on_islands

CPU = torch.device("cpu")


def prove(rank: int, plant: str) -> dict[str, Any]:
    ends = exact.Ends(dist.group.WORLD, rank, dist.get_world_size(), CPU)
    right = getattr(dist, plant or "recv")

    def wrong(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        done = right(tensor, *args, **more)
        if tensor.numel() == exact.COUNTS[-1]:
            tensor[-1] += 1
        return done

    if plant and rank == ends.world - 1:
        setattr(dist, plant, wrong)
    return exact.proved(ends)


def test_het_is_exact() -> None:
    found = on_islands((2, 1), prove, "")
    assert found == [{"sums": 8, "messages": 8, "wrong": []}] * 3


@pytest.mark.parametrize("plant", ["all_reduce", "recv"])
def test_one_wrong_value_is_told_by_all_ranks(plant: str) -> None:
    for found in on_islands((1, 1), prove, plant):
        assert found["wrong"]
        assert all(words.startswith("rank 1: 1 of 3000001") for words in found["wrong"])


def prove_islands(rank: int) -> dict[str, Any] | None:
    return exact.islands_proved(current_placement(), CPU)


def test_each_island_speaks_through_its_first_rank() -> None:
    found = on_islands((2, 1), prove_islands)
    assert [f and (f["name"], f["ranks"], f["wrong"]) for f in found] == [("island0", 2, []), None, ("island1", 1, [])]
    assert found[0]["libraries"] == [
        {"library": "gloo", "version": f"of torch {torch.__version__}", "file": "", "device": "cpu"}
    ]


def test_engines_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETCTL_RDMA", raising=False)
    assert "HETCTL_RDMA is not set" in exact.engines_tried(CPU)["lacking"]
    monkeypatch.setenv("HETCTL_RDMA", "sockets")
    found = exact.engines_tried(CPU)
    assert found["lacking"] == ""
    assert set(found["engines"]) == {"nixl", "mooncake"}
