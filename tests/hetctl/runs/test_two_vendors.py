"""One host with an NVIDIA and an AMD card, and an environment for each: both are found, judged, and start their ranks.

The host is a namespace dressed as such a workstation; CPU processes stand for its cards. The environments are real
ones that share this one's packages; their torch claims another build where the probe looks.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, other_environment
from tests.rigs.dress import Costume, Dress, dress_host, write
from tests.rigs.first_hosts import BUILDS

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SETTINGS = (
    "model.seq_len=16",
    "batch.global_batch=8",
    "train.steps=4",
    "checkpoint.every=2",
    "train.validation_samples=8",
)
SAYS = "import os, sys; 'RANK' in os.environ and print('started by', sys.prefix)\n"


@dataclass(frozen=True)
class Workstation:
    """The host, the folder of who sits before another machine, and the environments by vendor."""

    rig: netns.Rig
    mine: Path
    environments: dict[str, Path]

    def hetctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = environment(self.rig, OMP_NUM_THREADS="1")
        return subprocess.run(command(*words), cwd=self.mine, env=env, text=True, capture_output=True, timeout=400)

    @property
    def name(self) -> str:
        return self.rig.hosts[0].name

    def inventory(self, *vendors: str, host: str = "") -> None:
        named = {vendor: str(self.environments[vendor] / "bin" / "python") for vendor in vendors}
        python = named if len(named) > 1 else named[vendors[0]]
        (self.mine / "inventory.yaml").write_text(yaml.safe_dump({"hosts": {host or self.name: {"python": python}}}))


@pytest.fixture(scope="module")
def workstation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workstation]:
    folder, mine = tmp_path_factory.mktemp("box"), tmp_path_factory.mktemp("mine")
    dress = dressed(folder / "dress")
    environments = {vendor: folder / f"env-{vendor}" for vendor in BUILDS}
    for vendor, place in environments.items():
        make_environment(place, vendor, dress)
    with netns.hosts([netns.HostSpec(hide=(str(mine),))], folder / "rig") as rig:
        yield Workstation(rig, mine, environments)


def dressed(folder: Path) -> Dress:
    """A machine with a card of each vendor; its network is the rig's own."""
    cards = {"gpus": 1, "nics": 0, "tool_delay_s": 0.0}
    dress_host(folder, Costume(vendor="nvidia", **cards))  # type: ignore[arg-type]
    dress = dress_host(folder, Costume(vendor="amd", first_slot=1, management={"eth0": ""}, **cards))  # type: ignore[arg-type]
    write(dress.root, "/proc/modules", "nvidia 1234 0 - Live 0x0\namdgpu 1234 0 - Live 0x0")
    shutil.rmtree(dress.root / "sys/class/net")
    (dress.root / "sys/class/net").symlink_to("/sys/class/net")
    (dress.tools / "ip").unlink()
    (dress.tools / "ip").symlink_to(str(shutil.which("ip")))
    return dress


def make_environment(folder: Path, vendor: str, dress: Dress) -> None:
    """A Python that says in a rank's log where it is from, and whose torch claims to be the vendor's build."""
    other_environment(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "says.pth").write_text(SAYS)
    (packages / "torch").mkdir()  # without a module, so that the one of other.pth is imported
    version, built = BUILDS[vendor]
    (packages / "torch" / "version.py").write_text(f"__version__ = '{version}'\n{built}\n")
    python, real = folder / "bin" / "python", folder / "bin" / f"python3.{sys.version_info[1]}"
    real.unlink(missing_ok=True)
    real.symlink_to(netns.PYTHON)
    python.unlink()
    python.write_text(netns.dressed_python(dress, real))
    python.chmod(0o755)


def test_one_environment_drives_one_vendor_and_the_other_is_made_by_what_the_doctor_says(
    workstation: Workstation,
) -> None:
    workstation.inventory("nvidia")
    done = workstation.hetctl("doctor", "-i", "inventory.yaml", "--only", "sw", "--json")
    assert done.returncode == 1, done.stderr
    [found] = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "sw.build"]
    assert found["state"] == "fail"
    assert "amd: torch 2.13.0+cu128" in found["reason"]
    assert "python3 -m venv ~/hetctl-env-amd && " in found["fix"]
    assert "whl/rocm7.2" in found["fix"]
    assert "whl/cu128" not in found["fix"]


def test_both_vendors_train_each_by_its_own_environment(workstation: Workstation) -> None:
    workstation.inventory("nvidia", "amd")
    done = workstation.hetctl("discover", "-i", "inventory.yaml", "-o", "cluster.yaml", "--json")
    assert done.returncode == 0, done.stderr
    cluster = json.loads(done.stdout)
    assert [(i["vendor"], len(i["members"])) for i in cluster["islands"]] == [("nvidia", 1), ("amd", 1)]
    assert cluster["links"][0]["transports"][0]["kind"] == "shm"
    done = workstation.hetctl("doctor", "-i", "inventory.yaml", "--only", "sw", "--json")
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["sw.build"]["state"] == "ok", found["sw.build"]
    for vendor, (version, _) in BUILDS.items():
        assert f"{vendor}: torch {version} in {workstation.environments[vendor]}" in found["sw.build"]["reason"]
    run = trained(workstation, "cluster.yaml", "run")
    started_by_their_own(workstation, run)
    assert losses(run)[-1] < losses(run)[0]
    home = workstation.rig.hosts[0].folder / "home"
    assert len(list(home.glob(".local/state/hetctl/runs/*/*/checkpoints/step-00000004/manifest.json"))) == 1


def trained(workstation: Workstation, cluster: str, run: str) -> Path:
    """The folder of a run on CPU processes that stand for a cluster file's cards."""
    file = workstation.mine / cluster
    stand_ins = {"source: discovered": "source: emulated", "runs: null": "runs: gloo"}
    for real, said in stand_ins.items():
        file.write_text(file.read_text().replace(real, said))
    settings = [word for key in SETTINGS for word in ("--set", key)]
    done = workstation.hetctl("train", *settings, "--cluster", cluster, "--run-dir", run)
    assert done.returncode == 0, done.stdout + done.stderr
    return workstation.mine / run


def started_by_their_own(workstation: Workstation, run: Path) -> None:
    islands = yaml.safe_load((run / "plan.yaml").read_text())["islands"]
    assert [len(island["ranks"]) for island in islands] == [1, 1]
    for island in islands:
        said = (run / "logs" / f"rank-{island['ranks'][0]}.log").read_text()
        assert f"started by {workstation.environments[island['vendor']]}\n" in said


@pytest.mark.slow
def test_a_workstation_that_one_sits_at_needs_neither_ssh_nor_a_network(workstation: Workstation) -> None:
    workstation.inventory("nvidia", "amd", host="localhost")
    done = workstation.hetctl("discover", "-i", "inventory.yaml", "-o", "here.yaml")
    assert done.returncode == 0, done.stderr
    file = workstation.mine / "here.yaml"
    file.write_text(re.sub(r"data_address: [^,}\n]+", "data_address: null", file.read_text()))
    assert "data_address: null" in file.read_text()
    run = trained(workstation, "here.yaml", "here")
    started_by_their_own(workstation, run)
    assert (run / "checkpoints" / "step-00000004" / "manifest.json").is_file(), "its ranks see the run's own folder"


def test_a_vendor_whose_environment_is_gone_is_named_and_nothing_starts(workstation: Workstation) -> None:
    python = workstation.environments["amd"] / "bin" / "python"
    python.rename(python.with_name("hidden"))
    try:
        done = workstation.hetctl("train", "--cluster", "cluster.yaml", "--run-dir", "lost")
    finally:
        python.with_name("hidden").rename(python)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "cannot take part" in done.stderr
    assert str(python) in done.stderr
