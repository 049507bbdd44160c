"""Discovery over SSH of hosts dressed as those that half work: the right islands, and what is left out is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import load_cluster
from tests.hetctl.discovery.test_discover_hosts import Run, hetctl
from tests.rigs import netns
from tests.rigs.dress import Costume, Dress, dress_host, tool

WHY_NOT = netns.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n"
LOST = "Unable to determine the device handle for GPU0: 0000:13:00.0: GPU is lost.  Reboot the system\n"


def dressed(folder: Path, number: int, vendor: str) -> Dress:
    """Pure InfiniBand, no IP on it, and a plain network for management."""
    management = {"eno1": f"192.168.0.{number + 1}"}
    return dress_host(
        folder / f"dress{number}", Costume(f"n{number}", number, vendor, ipoib="off", management=management)
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("rig")
    dresses = [dressed(folder, n, "amd" if n == 1 else "nvidia") for n in range(4)]
    tool(dresses[2].tools, "nvidia-smi", {"-q -x": MISMATCH}, delay_s=0)
    whole = (dresses[3].tools / ".nvidia-smi.0").read_text()
    tool(dresses[3].tools, "nvidia-smi", {"-q -x": LOST + whole}, delay_s=0)
    specs = [netns.HostSpec(tools={"python3": netns.dressed_python(dress)}) for dress in dresses]
    with netns.hosts(specs, folder) as rig:
        yield hetctl(rig, folder, "discover", *(host.name for host in rig.hosts), "--capture", "out.tgz")


def test_islands_hold_what_works_over_the_fabric_that_is_there(run: Run) -> None:
    assert run.exit_code == 0, run.stderr
    assert "Traceback" not in run.stderr
    cluster = load_cluster(run.folder / "cluster.yaml")
    kinds = {n.name: n.kind for n in cluster.networks} | {"host": "host"}
    names = [host.name for host in run.rig.hosts]
    assert {i.vendor: (kinds[i.fabric], len(i.members), i.hosts) for i in cluster.islands} == {
        "nvidia": ("infiniband", 15, (names[0], names[3])),
        "amd": ("host", 8, (names[1],)),
    }


def test_what_cannot_be_used_is_said_with_the_reason(run: Run) -> None:
    said = [note["sentence"] for note in run.document["notes"]]
    assert any("cannot be used: GPU is lost" in sentence and "0000:13:00.0" in sentence for sentence in said)
    assert sum("nvidia:7" in s or "and 4 more" in s for s in said if "Driver/library version mismatch" in s) == 1


def test_the_capture_of_them_says_the_same(run: Run) -> None:
    again = hetctl(run.rig, run.folder, "discover", "--from-capture", "out.tgz", "-o", "again.yaml")
    assert again.exit_code == 0, again.stderr
    assert [len(i["members"]) for i in again.document["islands"]] == [
        len(i["members"]) for i in run.document["islands"]
    ]
