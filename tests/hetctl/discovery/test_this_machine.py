"""What an emulation stands on: GPUs, GPUs that islands share, or processes on CPUs."""

from __future__ import annotations

import pytest

from hetctl.console import Sink
from hetctl.discovery import this_machine
from hetctl.discovery.which_cluster import Where, running_cluster
from hetctl.trainer.planning.hardware import CLASSES

GiB = 2**30


@pytest.mark.parametrize(
    ("gpus", "counts", "native", "memories", "shared"),
    [
        (4, [2, 2], "nccl", (80,) * 4, None),
        (2, [2, 2], "nccl", (40,) * 4, 2),
        (2, [1, 2], "nccl", (40,) * 3, 2),
        (1, [1, 1, 1], "nccl", (26,) * 3, 1),
        (2, [3, 1], "gloo", None, None),  # an island needs a device for each of its ranks
        (0, [1, 1], "gloo", None, None),
    ],
)
def test_gpus_are_shared_by_islands_never_within_one(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    counts: list[int],
    native: str,
    memories: tuple[int, ...] | None,
    shared: int | None,
) -> None:
    monkeypatch.setattr(this_machine, "_gpu_memories", lambda: [80 * GiB] * gpus)
    monkeypatch.setattr(this_machine, "gpu_class", lambda: CLASSES["h100"])
    monkeypatch.setattr(this_machine, "_library", lambda: "nccl")
    machine, words = this_machine.this_machine(counts)
    assert (machine.native, machine.gpus) == (native, shared)
    assert len(machine.memory_bytes) >= sum(counts)
    if memories:
        assert tuple(b // GiB for b in machine.memory_bytes if b) == memories
    assert ("shared" in words) == (shared is not None), words
    assert ("CPU processes" in words) == (native == "gloo"), words


@pytest.mark.parametrize(
    ("spec", "native", "said"),
    [
        ("h200:1,cpu:2", "nccl", "1 of this machine's 2 GPUs and 2 CPU processes"),
        ("cpu:2,cpu:2", "gloo", "no GPU asked for, so 4 CPU processes share"),
        ("h200:3,cpu:1", "gloo", "only 2 GPUs here for 3 ranks, so 4 CPU processes share"),
    ],
)
def test_islands_of_cpus_take_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str, native: str, said: str
) -> None:
    monkeypatch.setattr(this_machine, "_gpu_memories", lambda: [80 * GiB] * 2)
    monkeypatch.setattr(this_machine, "gpu_class", lambda: CLASSES["h100"])
    monkeypatch.setattr(this_machine, "_library", lambda: "nccl")
    assert running_cluster(Where(None, spec), Sink()).runs == native
    assert said in capsys.readouterr().out
