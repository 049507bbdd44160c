"""Memory that a display uses is seen when a host is discovered, and left to it by plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import Infeasible
from hetctl.comm.contract.facts import GpuFacts, HostFacts, Instance, Partition, Process
from hetctl.comm.contract.units import GiB, MiB
from hetctl.discovery.devices import devices_of
from hetctl.probe import parse
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe
from tests.hetctl.probe.recordings import recordings

GPU = GpuFacts("nvidia", 0, "NVIDIA GeForce RTX 4090", memory_total_bytes=24 * GiB, memory_free_bytes=22 * GiB)


def used(gpu: GpuFacts) -> int | None:
    (device,) = devices_of(HostFacts(gpus=(gpu,)), []).devices
    return device.used_bytes


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("nvidia-smi/r595-rtx-4080-super", 2048 * MiB),  # 434 MiB are the driver's, 1474 a desktop's
        ("nvidia-smi/r516-rtx-2080-windows", 1280 * MiB),
        ("rocm-smi/rocm6.1-rx6700xt", 1536 * MiB),
        ("nvidia-smi/r550-rtx-4090", None),  # 354 MiB: the driver's
        ("nvidia-smi/r550-rtx-3070", None),
        ("nvidia-smi/r550-restricted", None),  # unknown
        ("rocm-smi/rocm7-rx7900xt", None),
    ],
)
def test_of_recordings_those_with_a_desktop_have_less(case: str, expected: int | None) -> None:
    (recording,) = [one for one in recordings() if one.name == case]
    found = devices_of(parse(recording.raw()), [])
    assert [device.used_bytes for device in found.devices] == [expected]
    assert any("used by others" in note for note in found.notes) == (expected is not None)


def test_large_processes_are_the_doctor_s_affair_and_unknown_is_not_zero() -> None:
    assert used(GPU) == 2 * GiB
    job = Process(1, "python", 8 * GiB)
    assert used(replace(GPU, memory_free_bytes=14 * GiB, processes=(job, Process(2, "Xorg", GiB)))) == 2 * GiB
    assert used(replace(GPU, memory_free_bytes=15 * GiB + 512 * MiB, processes=(job,))) is None
    assert used(replace(GPU, memory_free_bytes=14 * GiB, processes=None)) == 10 * GiB
    assert used(replace(GPU, memory_free_bytes=None)) is None
    assert used(replace(GPU, memory_total_bytes=None)) is None
    slices = Partition("mig", instances=(Instance("1g.5gb", "MIG-1", 4 * GiB, GiB),))
    assert used(replace(GPU, name="NVIDIA A100", partition=slices)) is None


def cluster(used_bytes: int | None) -> Cluster:
    made = describe_cluster(parse_spec("rtx4090:1", CLASSES), CLASSES)
    devices = tuple(replace(device, used_bytes=used_bytes) for device in made.hosts[0].devices)
    return replace(made, hosts=(replace(made.hosts[0], devices=devices),))


def test_plans_leave_it_hold_ranks_to_the_rest_and_say_so() -> None:
    sizes = [("model.name", "llama-8b"), ("model.seq_len", 2048), ("batch.global_batch", 8), ("lora.rank", 16)]
    recipe = load_recipe(None, sizes)
    free, beside = make_plan(cluster(None), recipe), make_plan(cluster(2 * GiB), recipe)
    assert (free.ranks[0].memory_bytes, beside.ranks[0].memory_bytes) == (24 * GiB, 22 * GiB)
    assert free.predicted is not None
    assert beside.predicted is not None
    assert beside.predicted.memory_bytes[0] <= 22 * GiB * 0.96
    said = "Of 1 rtx4090 2.0 GiB of memory was used by others"
    assert [any(reason.startswith(said) for reason in one.reasons) for one in (free, beside)] == [False, True]
    with pytest.raises(Infeasible, match=r"9\.5 GiB is usable"):  # 96 % of 12 GiB, less the runtime
        make_plan(cluster(12 * GiB), recipe)


def test_digests_of_files_without_it_hold() -> None:
    assert cluster(None).digest == "e83c485b3f619116"  # as it was before devices had the field
    assert cluster(GiB).digest not in (cluster(None).digest, cluster(2 * GiB).digest)
