"""Hosts to plant faults on, runs to disturb, and the moment: a run is started, its stage awaited, the fault planted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.plant import FAULTS, PORTS, RAISE, Launcher, Scene, is_ours, root_of
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, other_environment, write_cluster

STEPS = 6
STEPS_IN_A_ROW = 12  # of a run that several faults hit one after the other
SETTINGS = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "checkpoint.every=1")
SETTINGS = (*SETTINGS, "checkpoint.keep=1", "train.timeout_s=15")
END_S = 90.0
PAUSE_S = {"shipping": 0.3, "rendezvous": 3.0, "step": 0.1, "checkpoint": 0.0, "teardown": 0.05}  # a random part of it
DISK_MIB = 256
# Ranks raise on a signal, wherever they are. Torch's compiler, which every optimiser loads and eager training never
# uses, stays away: 2 s of CPU less per rank.
SITE = f"""
import os, signal, sys, types
if "RANK" in os.environ:
    def planted(*_): raise ValueError("planted")
    signal.signal({int(RAISE)}, planted)
    sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
    sys.modules["torch._dynamo"].disable = lambda fn=None, *_, **__: fn
    sys.modules["torch._dynamo"].graph_break = lambda *_, **__: None
    sys.modules["torch._dynamo"].trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
"""


@dataclass(frozen=True)
class Case:
    """What is to be tried: a fault, when, where, and how long after its stage was reached (a share of PAUSE_S)."""

    fault: str
    stage: str
    victim: int
    pause: float = 0.0

    @classmethod
    def drawn(cls, cell: tuple[str, str], chance: random.Random) -> Case:
        return cls(*cell, chance.randrange(2), round(chance.random(), 3))

    def __str__(self) -> str:
        return f"{self.fault:18} {self.stage:10} host {self.victim} +{self.pause * PAUSE_S[self.stage]:4.2f} s"


@dataclass
class Verdict:
    """What became of one case; `problems` is empty when all that must hold did."""

    fault: str
    stage: str
    victim: int
    planted: bool = False  # False: the run was over before
    exit_code: int | None = None
    reason: str = ""
    detected_s: float | None = None  # from the fault until the launcher said that something failed
    stopped_s: float = 0.0  # from the fault until nothing of the run ran any more, anywhere
    whole_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Stage:
    """The rig, the cluster on it and the losses of an undisturbed run."""

    def __init__(self, rig: netns.Rig, folder: Path, text: Path, *, steps: int, settings: Sequence[str] = ()) -> None:
        self.rig, self.folder, self.text, self.steps, self.settings = rig, folder, text, steps, settings
        self.standing = {pid for host in rig.hosts for pid in host.pids()}
        self.reference: list[float] = []
        self.unswept = False  # a fault left half-made files that the next agents remove
        self.count = 0

    def start(self, run: Path) -> Launcher:
        """A run, or the rest of it, in the background."""
        keys = (*SETTINGS, f"train.steps={self.steps}", f"data.source={self.text}", *self.settings)
        settings = [word for key in keys for word in ("--set", key)]
        argv = command("train", "--cluster", "cluster.yaml", "--run-dir", str(run), "--json", *settings)
        return Launcher(self._begin(argv))

    def hetctl(self, *words: str) -> Launcher:
        return Launcher(self._begin(command(*words)))

    def _begin(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        env = environment(self.rig, HETCTL_PORTS=f"{PORTS[0]}-{PORTS[-1]}")
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.folder, env=env, text=True, stdout=pipe, stderr=pipe)

    def fresh(self) -> Path:
        """The folder of a new run; what former ones left on the small disks goes away."""
        for host in self.rig.hosts:
            shutil.rmtree(home_of(host) / ".local" / "state" / "hetctl" / "runs", ignore_errors=True)
        self.count += 1
        return self.folder / f"case-{self.count}"

    def run_reference(self) -> None:
        launcher = self.start(self.folder / "reference")
        assert launcher.end(240), launcher.said
        assert launcher.process.returncode == 0, launcher.said
        self.reference = losses(self.folder / "reference")


@contextlib.contextmanager
def stage(
    folder: Path, *, small: bool = False, steps: int = STEPS, settings: Sequence[str] = (), others: int = 0
) -> Iterator[Stage]:
    """Two hosts, three ranks (two if `small`), nothing shared, a small disk for each; `others` are in no cluster."""
    mine = folder / "mine"
    mine.mkdir(parents=True)
    specs = []
    for number in range(2 + others):
        (folder / f"t{number}").mkdir()
        env = {"TMPDIR": str(folder / f"t{number}")}
        specs.append(netns.HostSpec(hide=(str(mine),), home_mib=DISK_MIB, env=env))
    with netns.hosts(specs, folder, rails=1) as rig:
        python = other_environment(folder / "python")
        next((folder / "python").glob("lib/python*/site-packages")).joinpath("sitecustomize.py").write_text(SITE)
        islands = {"h200": ((0, 1),), "mi325x": ((1, 1 if small else 2),)}
        write_cluster(rig, islands, mine / "cluster.yaml", python={0: python, 1: python})
        text = folder / "text.txt"  # that all hosts see
        text.write_text("".join(f"line {n}: {n * n % 9973} is what {n} squared leaves\n" for n in range(4000)))
        made = Stage(rig, mine, text, steps=steps, settings=settings)
        made.run_reference()
        yield made


def home_of(host: netns.RigHost) -> Path:
    """A host's HOME as this machine sees it."""
    return Path(f"{root_of(host)}{host.folder}/home")


def plant(on: Stage, case: Case, run: Path, undo: contextlib.ExitStack) -> tuple[Scene, bool]:
    """Start the run, or go on with it, and plant the fault when its time has come; False when it ended before."""
    fault = FAULTS[case.fault]
    scene = Scene(on.rig, on.folder, run, case.victim, undo)
    if case.stage == "shipping":
        shutil.rmtree(home_of(scene.host) / ".cache" / "hetctl", ignore_errors=True)  # there is something to ship
    if fault.prepare is not None:
        fault.prepare(scene)
    before = steps_of(run)
    launcher = scene.launcher = on.start(run)
    undo.callback(launcher.process.kill)
    reached = _Reached(scene, case.stage, home_of(scene.host), before, steps=on.steps)
    while launcher.process.poll() is None:
        if reached():
            time.sleep(case.pause * PAUSE_S[case.stage])  # the moment within the stage is part of the case
            return scene, fault.plant(scene)
        time.sleep(0.002)
    return scene, False


def steps_of(run: Path) -> int:
    """The lines of figures that a run has written."""
    with contextlib.suppress(FileNotFoundError):  # a run that begins anew removes what there was
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0


class _Reached:
    """Whether a run is in a stage."""

    def __init__(self, scene: Scene, name: str, home: Path, before: int, *, steps: int) -> None:
        self.scene, self.name, self.before, self.steps = scene, name, before, steps
        self.runs = home / ".local" / "state" / "hetctl" / "runs"
        self.stale = set(self._partial())

    def __call__(self) -> bool:
        scene, run = self.scene, self.scene.run
        if self.name == "shipping":
            return any(map(is_ours, scene.host.pids()))
        if self.name == "rendezvous":
            return bool(scene.ranks())
        if self.name == "checkpoint":
            return bool(set(self._partial()) - self.stale)
        if self.name == "teardown":
            return steps_of(run) > self.before and _last_step(run) == self.steps
        return steps_of(run) > self.before + 1

    def _partial(self) -> Iterator[str]:
        return map(str, self.runs.glob(f"{self.scene.run.name}-*/*/checkpoints/*.partial"))


def _last_step(run: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return 0


def lane_environment() -> dict[str, str]:
    """Of a further process of this program."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
