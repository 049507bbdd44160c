"""`hetctl bench ops --cluster`: which devices stand for which classes, what fails alone, what is in the profile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetctl.bench import classes
from hetctl.bench.classes import Measured, bench_classes, places_of, raise_unless_all, turn
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Access, Cluster, Device, Host, Island, Member, load_cluster, save_cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, HetctlError, Interrupted, Unreachable, WorkFailed
from hetctl.comm.contract.values import decode, encode
from hetctl.console import Sink
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.bench import grid
from hetctl.trainer.bench import ops as measuring
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure
from hetctl.trainer.model.config import find_shape
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.model.tensor_parallel import ALONE
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.profile import ClassProfile, LayerSizes, Point, Profile, load_profile, save_profile
from hetctl.trainer.recipe import load_recipe
from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
VENDORS = {"h200": "nvidia", "a100/3g.40gb": "nvidia", "mi325x": "amd"}
TINY = tuple(
    ShapeToMeasure(ModelShape(f"tiny-{hidden}", "llama", 3, hidden, 2, heads, 2 * hidden, 32 * hidden), length, (1, 2))
    for hidden, heads, length in ((16, 1, 16), (32, 2, 8), (48, 2, 24), (64, 1, 32))
)


def cluster(*hosts: tuple[str, ...]) -> Cluster:
    """Hosts n0, n1, ... with these classes of devices, an island each class."""
    made = tuple(
        Host(f"n{n}", Access(f"n{n}"), devices=tuple(Device(i, VENDORS[name], name) for i, name in enumerate(names)))
        for n, names in enumerate(hosts)
    )
    members: dict[str, list[Member]] = {}
    for host in made:
        for device in host.devices:
            members.setdefault(device.device_class, []).append(Member(host.name, device.index))
    islands = tuple(Island(name, VENDORS[name], "net", tuple(found)) for name, found in members.items())
    return Cluster(made, islands, runs="gloo")


def test_each_class_is_measured_on_the_first_hosts_that_have_it() -> None:
    two = ("h200", "h200")
    assert places_of(cluster(two, two, ("mi325x",), two, two)) == {
        "h200": [Member("n0", 0), Member("n1", 0), Member("n3", 0)],
        "mi325x": [Member("n2", 0)],
    }


def test_this_machine_does_not_stand_in_for_hosts_that_nobody_can_enter() -> None:
    with pytest.raises(ConfigError, match="does not say how 'h200-0' is entered"):
        places_of(describe_cluster(parse_spec("h200:8", CLASSES), CLASSES))


def test_classes_of_one_host_take_turns() -> None:
    places = places_of(cluster(("h200", "a100/3g.40gb"), ("mi325x",), ("mi325x", "a100/3g.40gb")))
    assert turn(places) == {"h200": Member("n0", 0), "mi325x": Member("n1", 0)}
    del places["h200"], places["mi325x"]
    assert turn(places) == {"a100/3g.40gb": Member("n0", 1)}


def test_labels_of_an_emulation_are_one_class_what_they_run_on() -> None:
    emulated = replace(
        describe_cluster(parse_spec("h200:2,mi325x:2", CLASSES), CLASSES), source="emulated", runs="gloo"
    )
    assert list(places_of(emulated)) == ["cpu"]
    assert list(places_of(replace(emulated, runs="nccl", runs_class="h100"))) == ["h100"]


def entry_of(name: str, row: ShapeToMeasure) -> ClassProfile:
    points = tuple(Point(n, n * row.shape.hidden * row.seq_len * 1e-6, 1e-6) for n in row.samples)
    sizes = LayerSizes.of(row.shape)
    return ClassProfile(name, row.shape.name, row.seq_len, points, points, points, 1e-9, sizes=sizes)


class Ranks:
    """In the place of `run_ranks`: each launch's ranks find what their request asks for, but for what `script` says.

    Of a class it says after how many shapes what happens: a sentence is told by the rank itself, an error ends all.
    """

    def __init__(self, *scripts: Mapping[str, tuple[int, str | HetctlError]]) -> None:
        self.scripts = list(scripts)
        self.launches: list[dict[str, str]] = []

    def __call__(self, module: str, launch: Launch, on_figures: Any, *, files: Any, sink: Sink) -> None:
        self.launches.append({i.name: s.host for i, s in zip(launch.islands, launch.seats, strict=True)})
        asked = [decode(ClassToMeasure, one, where="") for one in json.loads(files(None)[variables.BENCH_CLASSES])]
        script = self.scripts.pop(0) if self.scripts else {}
        error: HetctlError | None = None
        for one in asked:
            most, problem = script.get(one.device_class, (len(one.shapes), ""))
            for number, row in enumerate(one.shapes[:most], 1):
                entry = encode(entry_of(one.device_class, row))
                at = {"device_class": one.device_class, "shape": row.name, "number": number, "of": len(one.shapes)}
                on_figures("shape", {**at, "entry": entry})
            if isinstance(problem, HetctlError):
                error = problem
            elif problem != "silent":
                on_figures("ended", {"device_class": one.device_class, "problem": problem or None})
        if error is not None:
            raise error


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ON_CPUS", TINY)


def bench(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, where: Cluster, output: Path, *more: ShapeToMeasure
) -> Measured:
    monkeypatch.setattr(classes, "run_ranks", ranks)
    return bench_classes(where, more, output=output, sink=Sink())


def blaming(host: str, error: HetctlError) -> HetctlError:
    error.hosts = {host: error}
    return error


def count(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in load_profile(path).classes:
        found[entry.device_class] = found.get(entry.device_class, 0) + 1
    return found


def test_all_classes_at_once_and_the_model_asked_for_behind_the_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks, path = Ranks(), tmp_path / "p.yaml"
    save_profile(path, Profile((entry_of("t4", TINY[0]),)))
    found = bench(monkeypatch, ranks, cluster(("h200",), ("mi325x",)), path, ShapeToMeasure(SHAPES["demo"], 64, (1,)))
    assert ranks.launches == [{"h200": "n0", "mi325x": "n1"}]
    assert count(path) == {"t4": 1, "h200": len(TINY) + 1, "mi325x": len(TINY) + 1}
    assert found.failed == {}
    raise_unless_all(found)
    assert [e.seq_len for e in load_profile(path).matching(SHAPES["demo"], 64)] == [64, 64]


def test_a_class_goes_on_to_its_next_host_and_others_begin_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    down = blaming("n0", Unreachable("no answer"))
    ranks = Ranks({"h200": (0, down), "mi325x": (0, "silent")})
    found = bench(monkeypatch, ranks, cluster(("h200",), ("h200",), ("mi325x",)), tmp_path / "p.yaml")
    assert ranks.launches == [{"h200": "n0", "mi325x": "n2"}, {"h200": "n1", "mi325x": "n2"}]
    assert (found.failed, found.hosts) == ({}, {"h200": "n1", "mi325x": "n2"})


def test_a_class_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crash = blaming("n0", WorkFailed("the measurement failed: killed by SIGKILL"))
    ranks, path = Ranks({"mi325x": (2, "silent"), "h200": (1, crash)}), tmp_path / "p.yaml"
    found = bench(monkeypatch, ranks, cluster(("h200",), ("mi325x",)), path)
    assert ranks.launches[1:] == [{"mi325x": "n1"}]
    assert count(path) == {"h200": 1, "mi325x": len(TINY)}, "what the crash left is kept"
    assert found.failed == {"h200": "n0: the measurement failed: killed by SIGKILL"}
    with pytest.raises(WorkFailed, match=r"1 of 2 device classes failed:\n  h200: n0: .*SIGKILL") as told:
        raise_unless_all(found)
    assert told.value.exit_code == 1


def test_what_a_rank_says_of_itself_fails_its_class_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks({"h200": (0, "RuntimeError: no kernel image")})
    found = bench(monkeypatch, ranks, cluster(("h200",), ("mi325x",)), tmp_path / "p.yaml")
    assert len(ranks.launches) == 1
    assert (list(found.entries), found.failed) == (["mi325x"], {"h200": "RuntimeError: no kernel image"})
    nothing = bench(monkeypatch, Ranks({"h200": (0, "silent")}), cluster(("h200",)), tmp_path / "none.yaml")
    assert nothing.failed == {"h200": "its measurement ended without a result"}
    assert not (tmp_path / "none.yaml").exists()
    small = bench(monkeypatch, Ranks({"h200": (0, "")}), cluster(("h200",)), tmp_path / "none.yaml")
    assert small.failed == {"h200": "no shape fits on it"}


def test_an_error_that_blames_no_host_ends_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks({"h200": (0, WorkFailed("no room"))})
    found = bench(monkeypatch, ranks, cluster(("h200",)), tmp_path / "p.yaml")
    assert (len(ranks.launches), found.failed) == (1, {"h200": "n0: no room"})


def test_an_interruption_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks, path = Ranks({"h200": (3, Interrupted("stopped"))}), tmp_path / "p.yaml"
    with pytest.raises(Interrupted):
        bench(monkeypatch, ranks, cluster(("h200",)), path)
    assert count(path) == {"h200": 3}


def test_a_profile_is_whole_at_any_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Writing fails half way: what was there before is there."""
    path = tmp_path / "p.yaml"
    bench(monkeypatch, Ranks(), cluster(("h200",)), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises((OSError, HetctlError)):
        bench(monkeypatch, Ranks(), cluster(("mi325x",)), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--class", "x"), "--class does not go with --cluster"),
        (("--tensor", "2", "--at-speed", "0.5"), "--at-speed and --tensor does not go with"),
        (("--seq-len", "64"), "--seq-len without --model"),
        (("--model", "demo", "--seq-len", "100000"), "is not within the 1024 positions"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_refused(argv: tuple[str, ...], said: str, tmp_path: Path) -> None:
    save_cluster(tmp_path / "c.yaml", cluster(("h200",)))
    words = command("bench", "ops", "--cluster", "c.yaml", *argv)
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "profile.yaml").exists()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[netns.Rig]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    specs = [netns.HostSpec(sshd=False), netns.HostSpec(), netns.HostSpec()]
    with netns.hosts(specs, tmp_path_factory.mktemp("rig"), rails=1) as made:
        yield made


def as_person(monkeypatch: pytest.MonkeyPatch, rig: netns.Rig) -> None:
    for name, value in environment(rig).items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def dressed(rig: netns.Rig, file: Path) -> Cluster:
    """Three hosts, the first of them down, whose CPUs pass for two classes: no emulation, or they would be one."""
    made = write_cluster(rig, {"h200": ((0, 1), (1, 1)), "mi325x": ((2, 1),)}, file)
    hosts = tuple(replace(h, devices=tuple(replace(d, memory_bytes=64 << 30) for d in h.devices)) for h in made.hosts)
    save_cluster(file, replace(made, hosts=hosts, source="discovered"))
    return load_cluster(file)


def test_two_hosts_measure_two_classes_and_a_plan_of_another_model_stands_on_it(
    rig: netns.Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_person(monkeypatch, rig)
    file, path = tmp_path / "cluster.yaml", tmp_path / "profile.yaml"
    found = bench_classes(dressed(rig, file), (), output=path, sink=Sink())
    assert found.failed == {}
    assert found.hosts == {"h200": rig.hosts[1].name, "mi325x": rig.hosts[2].name}, "the first host is down"
    assert count(path) == {"h200": len(TINY), "mi325x": len(TINY)}
    assert all(point.forward_s > 0 for e in load_profile(path).classes for point in (*e.block, *e.head))
    names = [Path(f"/proc/{pid}/comm").read_text() for host in rig.hosts for pid in host.pids()]
    assert not [name for name in names if "python" in name], "nothing is left"
    links = command("bench", "links", "--cluster", str(file))
    done = subprocess.run(links, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plan = make_plan(load_cluster(file), load_recipe(None, [("model.seq_len", 128)]), profile=load_profile(path))
    assert plan.predicted is not None
    assert plan.predicted.basis == "interpolated"
    for name in ("h200", "mi325x"):
        [said] = [r for r in plan.reasons if r.startswith(f"{name} at demo, 128 tokens: extrapolated in length")]
        assert f"from {len(TINY)} measured shapes" in said
    assert load_cluster(file).measured


@pytest.mark.slow
def test_a_class_whose_host_fails_is_named_and_the_other_kept(
    rig: netns.Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_person(monkeypatch, rig)
    made = write_cluster(rig, {"h200": ((1, 1),), "mi325x": ((0, 1),)}, tmp_path / "cluster.yaml")
    path = tmp_path / "profile.yaml"
    found = bench_classes(replace(made, source="discovered"), (), output=path, sink=Sink())
    assert count(path) == {"h200": len(TINY)}
    assert list(found.failed) == ["mi325x"]
    assert rig.hosts[0].name in found.failed["mi325x"]


@pytest.mark.slow
def test_this_machine_under_several_labels_is_measured_once(tmp_path: Path) -> None:
    """The command itself, with the grid as it is."""
    made = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    save_cluster(tmp_path / "c.yaml", replace(made, source="emulated", runs="gloo"))
    words = command("bench", "ops", "--cluster", "c.yaml", "--model", "demo", "--seq-len", "64", "--json")
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document["classes"]) == ["cpu"]
    assert document["classes"]["cpu"]["leave_one_out"]["worst"] > 0
    assert "demo at 64 tokens measured" in done.stderr
    assert len(load_profile(tmp_path / "profile.yaml").matching(SHAPES["demo"], 64)) == 1


@pytest.mark.slow
def test_ctrl_c_ends_it_with_its_code(tmp_path: Path) -> None:
    made = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    save_cluster(tmp_path / "c.yaml", replace(made, source="emulated", runs="gloo"))
    words = command("bench", "ops", "--cluster", "c.yaml")
    running = subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert running.stdout is not None
    for line in running.stdout:
        if "measured (1 of" in line:
            running.send_signal(signal.SIGINT)
            break
    running.stdout.read()
    assert running.wait(120) == 130
    assert load_profile(tmp_path / "profile.yaml").classes


class Operations(TorchDispatchMode):
    """How many are launched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_launches_are_those_of_blocks_that_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens, selective and full, which launch more than a block that does not (counted: times are the
    machine's)."""
    made, work = [], measuring.Workload(find_shape("demo"), 128, torch.device("cpu"), torch.float32)
    block = measuring._block

    def kept(of: measuring.Workload, samples: int, **more: Any) -> measuring.Timed:
        made.append((of.seq_len, samples, more["recompute"]))
        return block(of, samples, **more)

    def launched(once: measuring.Timed) -> int:
        with Operations() as counted:
            once()
        return counted.count

    monkeypatch.setattr(measuring, "_block", kept)
    found = measuring._launches(work, ALONE)
    assert made == [(measuring.FEW, 1, "selective"), (measuring.FEW, 1, "full")]
    assert min(found.seconds) > 0
    few = replace(work, seq_len=measuring.FEW)
    plain = launched(block(few, 1, part=ALONE))
    assert launched(block(few, 1, part=ALONE, recompute="selective")) > plain
    assert launched(block(few, 1, part=ALONE, recompute="full")) > plain


def test_an_offloaded_update_is_timed_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the device is the host: what a GPU's link takes is a copy."""
    monkeypatch.setattr(measuring, "UPDATED", 1 << 16)
    threads = torch.get_num_threads()
    found = measuring._offloaded_update(torch.device("cpu"), torch.bfloat16)
    assert found.copies_s > 0
    assert found.alone_s > 0
    assert torch.get_num_threads() == threads
