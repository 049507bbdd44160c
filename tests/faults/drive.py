"""One fault from start to verdict: start a run, wait for its stage, plant the fault, see it end, look, resume."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.plant import FAULTS, RAISE, Fault, Scene, environ, words
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, other_environment, write_cluster

STEPS = 6
SETTINGS = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "checkpoint.every=1")
SETTINGS = (*SETTINGS, f"train.steps={STEPS}", "checkpoint.keep=3", "train.timeout_s=8")
STOPPED_WITHIN_S = 25.0
END_S = 90.0
PORTS = "29500-29540"
# raises in the rank itself, wherever it is
SITE = f"""
import os, signal
if "RANK" in os.environ:
    def planted(*_): raise ValueError("planted")
    signal.signal({int(RAISE)}, planted)
"""


@dataclass
class Verdict:
    """What became of one case; `problems` is empty when all that must hold did."""

    fault: str
    stage: str
    planted: bool
    exit_code: int | None = None
    reason: str = ""
    stopped_s: float = 0.0  # from the fault until nothing of the run ran any more
    problems: list[str] = field(default_factory=list)


class Stage:
    """The rig, the cluster on it and the losses of an undisturbed run."""

    def __init__(self, rig: netns.Rig, folder: Path, text: Path) -> None:
        self.rig, self.folder, self.text = rig, folder, text
        self.reference: list[float] = []
        self.count = 0

    def start(self, run: Path) -> subprocess.Popen[str]:
        settings = [w for key in (*SETTINGS, f"data.source={self.text}") for w in ("--set", key)]
        argv = command("train", "--cluster", "cluster.yaml", "--run-dir", str(run), "--json", *settings)
        pipe = subprocess.PIPE
        env = environment(self.rig, HETCTL_PORTS=PORTS)
        return subprocess.Popen(argv, cwd=self.folder, env=env, text=True, stdout=pipe, stderr=pipe)

    def run_reference(self) -> None:
        process = self.start(self.folder / "reference")
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        self.reference = losses(self.folder / "reference")


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Two hosts, three ranks, nothing shared, a small disk for each."""
    os.environ["HETCTL_PORTS"] = PORTS
    mine = folder / "mine"
    mine.mkdir(parents=True)
    specs = [netns.HostSpec(hide=(str(mine),), home_mib=512) for _ in range(2)]
    with netns.hosts(specs, folder, rails=1) as rig:
        python = other_environment(folder / "python")
        next((folder / "python").glob("lib/python*/site-packages")).joinpath("sitecustomize.py").write_text(SITE)
        write_cluster(
            rig, {"h200": ((0, 1),), "mi325x": ((1, 2),)}, mine / "cluster.yaml", python={0: python, 1: python}
        )
        text = folder / "text.txt"  # that all hosts see
        text.write_text("".join(f"line {n}: {n * n % 9973} is what {n} squared leaves\n" for n in range(4000)))
        made = Stage(rig, mine, text)
        made.run_reference()
        yield made


def try_case(on: Stage, fault_name: str, stage_name: str, victim: int) -> Verdict:
    """One case. Never raises for what the run did: that is in the verdict."""
    fault, verdict = FAULTS[fault_name], Verdict(fault_name, stage_name, planted=False)
    on.count += 1
    run = on.folder / f"case-{on.count}"
    with contextlib.ExitStack() as undo:
        process = on.start(run)
        scene = Scene(on.rig, on.folder, run, process, victim, undo)
        if _await(scene, stage_name):
            verdict.planted = fault.plant(scene)
        began = time.monotonic()
        errors = _see_end(process, verdict)
        _await_nothing_left(on, run, began, verdict)
        _judge(scene, fault, verdict, errors)
    _judge_remains(on, verdict)
    if verdict.exit_code != 0:
        _resume(on, run, verdict)
    for host in on.rig.hosts:  # their disks are small
        shutil.rmtree(home_of(host) / ".local" / "state" / "hetctl" / "runs", ignore_errors=True)
    return verdict


def home_of(host: netns.RigHost) -> Path:
    """A host's HOME as this machine sees it: it is a file system of its own there."""
    server = next(p for p in host.pids() if b"sshd_config" in words(p))
    return Path(f"/proc/{server}/root{host.folder}/home")


def _await(scene: Scene, name: str) -> bool:
    """Until the run is in that stage; False when it ended before."""
    while scene.process.poll() is None:
        if _reached(scene, name):
            return True
        time.sleep(0.002)
    return False


def _reached(scene: Scene, name: str) -> bool:
    if name == "shipping":
        return any(b"stdin.readline" in words(p) or b"launcher.agent" in words(p) for p in scene.host.pids())
    if name == "rendezvous":
        return bool(scene.ranks())
    if name == "checkpoint":
        runs = home_of(scene.host) / ".local" / "state" / "hetctl" / "runs"
        return bool(list(runs.glob(f"{scene.run.name}-*/*/checkpoints/*.partial")))
    done = len(losses(scene.run)) if (scene.run / "metrics.jsonl").exists() else 0
    return done >= (2 if name == "step" else STEPS)


def _see_end(process: subprocess.Popen[str], verdict: Verdict) -> str:
    try:
        _, errors = process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        verdict.problems.append(f"the launcher did not end within {END_S:.0f} s")
    verdict.exit_code = process.returncode
    return errors


def _await_nothing_left(on: Stage, run: Path, began: float, verdict: Verdict) -> None:
    while left := marked(on, run):
        if time.monotonic() - began > STOPPED_WITHIN_S + 10:
            verdict.problems.append(f"still there: {[words(p)[:80] for p in left]}")
            break
        time.sleep(0.05)
    verdict.stopped_s = time.monotonic() - began


def marked(on: Stage, run: Path) -> list[int]:
    """Processes of a run in any host."""
    try:
        mark = f"HETCTL_RUN={(run / 'launch' / 'identity').read_text()}".encode()
    except OSError:
        return []
    return [pid for host in on.rig.hosts for pid in host.pids() if mark in environ(pid).split(b"\0")]


def _judge(scene: Scene, fault: Fault, verdict: Verdict, errors: str) -> None:
    failure = scene.run / "failure.json"
    verdict.reason = json.loads(failure.read_text())["reason"] if failure.exists() else errors.strip()[-400:]
    if not verdict.planted:
        return  # the run was over before: it has to have ended well
    if verdict.stopped_s > STOPPED_WITHIN_S and verdict.exit_code != 0:
        verdict.problems.append(f"{verdict.stopped_s:.1f} s until everything had stopped")
    if fault.loses_launcher or verdict.exit_code == 0:
        return
    if not fault.survives and verdict.exit_code not in (1, 4):
        verdict.problems.append(f"exit code {verdict.exit_code}: {errors[-300:]}")
    if fault.causes and not any(word.lower() in verdict.reason.lower() for word in fault.causes):
        verdict.problems.append(f"the cause is not named: {verdict.reason[:300]}")
    if fault.survives and not fault.causes:
        verdict.problems.append(f"it should have gone on: {verdict.reason[:300]}")


def _judge_remains(on: Stage, verdict: Verdict) -> None:
    """No port of a run's is open on any host, and no half-made file is left but a checkpoint's."""
    for host in on.rig.hosts:
        listening = [line for line in host.run("ss", "-Hltn").stdout.splitlines() if ":22 " not in line]
        if listening:
            verdict.problems.append(f"still listening on {host.name}: {listening[:3]}")
        partial = [str(p) for p in home_of(host).glob(".cache/hetctl/code/.new-*")]
        if partial:
            verdict.problems.append(f"half unpacked on {host.name}: {partial}")


def _resume(on: Stage, run: Path, verdict: Verdict) -> None:
    process = on.start(run)
    _, errors = process.communicate(timeout=240)
    if process.returncode != 0:
        verdict.problems.append(f"it cannot be resumed: {errors[-300:]}")
        return
    found = {json.loads(line)["step"]: json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()}
    told = range(1, STEPS + 1) if not FAULTS[verdict.fault].loses_launcher else found  # some steps nobody wrote down
    if [found.get(step) for step in told] != [on.reference[step - 1] for step in told]:
        verdict.problems.append("the resumed losses differ from an undisturbed run's")
