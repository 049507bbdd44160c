"""A product that no table has, from what its host said to the plan: a device with an estimate that is said aloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetctl.app import app
from hetctl.comm.contract.cluster import load_cluster
from hetctl.discovery import this_machine
from hetctl.probe import remote as program
from hetctl.probe.capture import Recording, write_capture
from hetctl.probe.raw import Options, load
from hetctl.probe.wanted import request
from hetctl.trainer.planning.hardware import CLASSES
from tests.rigs.dress import Costume, dress_host

GiB = 2**30


@pytest.fixture
def discovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """`hetctl discover` of a host with a product of tomorrow and one with an MI325X, by its id, that names a board."""
    monkeypatch.chdir(tmp_path)
    recorded = []
    for number, (vendor, product) in enumerate([("nvidia", "NVIDIA Z9000 SXM9"), ("amd", "AMD Board 5 OAM")]):
        costume = Costume(f"h{number}", number, vendor, product, gpus=2, nics=2, tool_delay_s=0)  # type: ignore[arg-type]
        dress = dress_host(tmp_path / vendor, costume)
        for device in (dress.root / "sys/bus/pci/devices").iterdir():
            if (device / "class").read_text().startswith("0x03"):
                (device / "device").write_text("0x74a5\n" if vendor == "amd" else "0xffff\n")
        raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))
        recorded.append(Recording(costume.name, raw))
    write_capture(tmp_path / "hosts.tgz", recorded)
    return hetctl("discover", "--from-capture", "hosts.tgz", "--json")


def hetctl(*words: str) -> Result:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done


def reasons(*words: str) -> str:
    plan = hetctl("plan", "--cluster", "cluster.yaml", "--model", "llama-1b", "--json", *words)
    return " ".join(json.loads(plan.stdout)["reasons"])


def test_it_is_discovered_said_and_planned_for(discovered: Result) -> None:
    [note] = [n["sentence"] for n in json.loads(discovered.stdout)["notes"] if "hardware table" in n["sentence"]]
    assert note.startswith("z9000-sxm9 is not in the hardware table and taken for 50% of what ")
    cluster = load_cluster(Path("cluster.yaml"))
    assert [i.name for i in cluster.islands] == ["z9000-sxm9", "mi325x"]
    [row] = cluster.classes
    assert row.peak_tflops == CLASSES["h20"].peak_tflops / 2  # the slowest of its sm_90
    assert row.memory_bytes == 143771 * 2**20
    assert note in reasons()


def test_a_person_knows_better(discovered: Result) -> None:
    assert "hardware table" not in reasons("--speed", "z9000-sxm9=700")
    like = "devices: {z9: {like: h200, names: [Z9000]}}\nschema_version: 1\n"
    Path("hardware.yaml").write_text(like)
    again = hetctl("discover", "--from-capture", "hosts.tgz", "--json")
    assert "hardware table" not in again.stdout
    assert [i.name for i in load_cluster(Path("cluster.yaml")).islands] == ["z9", "mi325x"]
    assert "hardware table" not in reasons()


def test_figures_said_for_one_command(discovered: Result) -> None:
    assert "hardware table" not in reasons("--device", "z9000-sxm9=tflops:700")


class Properties:
    total_memory, major, minor = 24 * GiB, 8, 6


class Devices:
    """Torch's module for one GPU of a product that no table has."""

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_name(index: int) -> str:
        return "NVIDIA GeForce RTX 3050"

    @staticmethod
    def get_device_properties(index: int) -> type[Properties]:
        return Properties


def test_this_machine_s_gpu_is_named_and_estimated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    rows = {n: r for n, r in this_machine.NATIVES.items() if n != "nvidia"}
    nvidia = this_machine.replace(this_machine.NATIVES["nvidia"], driver_node=str(tmp_path / "nvidiactl"))
    monkeypatch.setattr(this_machine, "NATIVES", {**rows, "nvidia": nvidia})
    monkeypatch.setattr(this_machine, "_devices", Devices)
    monkeypatch.setattr(this_machine, "_library", lambda: "nccl")
    machine, words = this_machine.this_machine([1])
    [row] = machine.classes
    assert (machine.device_class, row.name, row.architecture) == ("geforce-rtx-3050",) * 2 + ("sm_86",)
    assert "geforce-rtx-3050 is not in the hardware table and taken for 50% of what rtx3080 has" in words
