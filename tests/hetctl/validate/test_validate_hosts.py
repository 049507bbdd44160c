"""`hetctl validate --cluster` on two real hosts over SSH: the bridge between them, and a bundle that names neither."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.mark.slow
def test_two_hosts_and_one_that_is_away(tmp_path: Path) -> None:
    with netns.hosts(
        [netns.HostSpec(), netns.HostSpec(), netns.HostSpec(sshd=False)], tmp_path / "rig", rails=1
    ) as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1),)}, tmp_path / "two.yaml")
        found = validate(rig, tmp_path, "two.yaml", "bridge.tcp,doctor", code=0)
        assert found["bridge.tcp"]["verdict"] == "holds"
        assert found["doctor.rdma"]["verdict"] == "not applicable"
        assert found["bridge.tcp"]["figures"]["h200 - mi325x"]["exact"]["wrong"] == []
        _nobody_is_named(rig, tmp_path / "two.yaml.tgz")
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((2, 1),)}, tmp_path / "away.yaml")
        found = validate(rig, tmp_path, "away.yaml", "bridge.tcp,doctor", code=3)
        assert found["bridge.tcp"]["verdict"] == "could not tell"
        assert rig.hosts[2].name in found["bridge.tcp"]["says"]
        assert found["doctor.rdma"]["verdict"] == "could not tell", "the silent host may have RDMA ports"
        _nobody_is_named(rig, tmp_path / "away.yaml.tgz")


def validate(rig: netns.Rig, folder: Path, cluster: str, only: str, *, code: int) -> dict[str, dict[str, object]]:
    argv = command("validate", "--cluster", cluster, "--quick", "--only", only, "--bundle", f"{cluster}.tgz", "--json")
    done = subprocess.run(argv, cwd=folder, env=environment(rig), text=True, capture_output=True, timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    return {c["id"]: c for c in json.loads(done.stdout)["claims"]}


def _nobody_is_named(rig: netns.Rig, bundle: Path) -> None:
    names = [n for h in rig.hosts for n in (h.name, h.address, *h.rails)] + [str(rig.home)]
    with tarfile.open(bundle) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            text = member.name + content.read().decode()
            assert [n for n in names if n in text] == [], member.name
