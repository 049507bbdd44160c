"""The measurements of a bridge: sensible figures for every size and way, and costs that are counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.bench import exact, measure
from hetctl.comm.contract.units import KiB, MiB
from tests.comm.spawn import on_islands

MOST = 100_000


def figures(rank: int) -> dict[str, Any]:
    found = {}
    task = measure.Task(("tcp", "shm"), MOST, native=False)
    for name, ends in measure.ways(task, torch.device("cpu")):
        assert (ends.peer is None) == (rank == 1)
        found[name] = measure.way(ends, MOST)
    found["raw"] = measure.raw_ceilings(exact.Ends(dist.group.WORLD, rank, 3, torch.device("cpu")), nbytes=MiB)
    return found


def test_every_way_is_measured() -> None:
    found = on_islands((2, 1), figures, seconds=90)[0]
    assert list(found) == ["tcp", "shm", "raw"]
    for name in ("tcp", "shm"):
        way = found[name]
        assert list(way["message_bytes_per_s"]) == list(way["all_reduce_s"]) == ["1024", "8192", "65536", "100000"]
        assert all(rate > 0 for rate in way["message_bytes_per_s"].values())
        assert list(way["collectives_bytes_per_s"]) == ["all-gather", "reduce-scatter", "broadcast", "all-to-all"]
        for rates in way["collectives_bytes_per_s"].values():
            assert list(rates) == list(way["all_reduce_s"])
            assert min(rates.values()) > 0
        assert 0 < way["latency_s"]["p50"] <= way["latency_s"]["p99"]
        assert way["cpu_s_per_gb"] > 0
    # a host tensor is read into a slot and written out of one: 4 x; over sockets each slot is read and written again
    assert 3.99e9 < found["shm"]["host_bytes_per_gb"] < 4.1e9
    assert 5.99e9 < found["tcp"]["host_bytes_per_gb"] < 6.1e9
    assert all(rate > 0 for rate in found["raw"].values())


def counts(rank: int) -> list[int]:
    """What a rank times when both have waited unequally long: between, below and above the limits."""
    ends = exact.Ends(dist.group.WORLD, rank, 2, torch.device("cpu"))
    return [measure._enough(ends, mine[rank]) for mine in ((1e-3, 1e-9), (1e-9, 0.003), (0.01, 9.0), (9.0, 0.01))]


def test_both_ends_time_as_many_messages_as_the_first_says() -> None:
    assert on_islands((1, 1), counts) == [[250, 1000, 25, 4]] * 2


def test_sizes_grow_eightfold_and_end_with_the_largest() -> None:
    assert measure.sizes_up_to(64 * KiB) == [KiB, 8 * KiB, 64 * KiB]
    assert measure.sizes_up_to(1000) == [1000]
