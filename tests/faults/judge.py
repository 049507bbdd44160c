"""What must be true after each fault, and the whole of one case from start to verdict."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tests.busy import busy
from tests.faults.drive import END_S, Case, Stage, Verdict, home_of, plant
from tests.faults.plant import FAULTS, Fault, Scene, fail_another, words

DETECTED_WITHIN_S = 2.0
STOPPED_WITHIN_S = 25.0
SIGNS = ("; the other ranks are ended", " cannot take part: ")  # by which the launcher says that it knows
_RUN = ".local/state/hetctl/runs/*/*"
HALF_MADE = (
    ".cache/hetctl/code/.new-*",
    f"{_RUN}/checkpoints/*.partial",
    f"{_RUN}/checkpoints/gathered-*",
    f"{_RUN}/launch/.new-*",
)


def try_case(on: Stage, case: Case, run: Path | None = None, *, go_on: bool = True) -> Verdict:
    """One case, on a new run or on one that an earlier case left. Never raises for what the run did.

    `go_on`: see it through afterwards, to the losses of an undisturbed run.
    """
    fault, verdict = FAULTS[case.fault], Verdict(case.fault, case.stage, case.victim)
    began, run = time.monotonic(), run or on.fresh()
    committed, attempts = committed_step(on, run), len(begun_at(run))
    with contextlib.ExitStack() as undo:
        scene, verdict.planted = plant(on, case, run, undo)
        if not scene.launcher.end(END_S):
            verdict.problems.append(f"the launcher did not end within {END_S:.0f} s: {scene.launcher.said[-300:]}")
        verdict.exit_code = scene.launcher.process.returncode
        if scene.other is not None and not verdict.planted:
            fail_another(scene)
        _await_nothing_left(on, scene, verdict)
        _judge(scene, fault, verdict)
    # in a row, what one case left is not there any more when the next one's agents are
    on.unswept = case.stage in fault.sweeps_later or (
        on.unswept and case.stage == "shipping" and verdict.exit_code != 0
    )
    if not on.unswept:
        _judge_remains(on, verdict)
    _judge_registry(on, fault, verdict)
    judge_beginning(run, attempts, committed, verdict)
    if go_on and verdict.exit_code != 0:
        committed, attempts = committed_step(on, run), len(begun_at(run))
        again = on.start(run)
        if not again.end(240) or again.process.returncode:
            verdict.problems.append(f"it cannot be resumed: {again.said[-300:]}")
        if on.unswept:
            _judge_remains(on, verdict)
            on.unswept = False
        judge_beginning(run, attempts, committed, verdict)
    if go_on or verdict.exit_code == 0:
        judge_losses(on, run, verdict)
    verdict.whole_s = time.monotonic() - began
    return verdict


def judge_losses(on: Stage, run: Path, verdict: Verdict) -> None:
    """Every step was written down, and whichever attempt did it came to what an undisturbed run did, bit for bit."""
    if missing := [n for n in ("summary.json", "metrics.jsonl") if not (run / n).exists()]:
        verdict.problems.append(f"no {missing} in the end")
        return
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {m["step"] for m in told}
    if any(m["loss"] != on.reference[m["step"] - 1] for m in told):
        verdict.problems.append("losses differ from an undisturbed run's")
    if steps != set(range(1, on.steps + 1)):
        verdict.problems.append(f"only steps {sorted(steps)} were written down")
    summary = json.loads((run / "summary.json").read_text())
    if summary["status"] != "done" or summary["processes_left"]:
        verdict.problems.append(f"in the end: {summary['status']}, {summary['processes_left']} processes left")


def committed_step(on: Stage, run: Path) -> int:
    """The newest step whose checkpoint all hosts have under its name, or was said to be whole; 0 for none."""
    named = f".local/state/hetctl/runs/{run.name}-*/*/checkpoints/step-*"
    steps = [
        {int(p.name.removeprefix("step-")) for p in home_of(host).glob(named) if p.suffix != ".partial"}
        for host in on.rig.hosts
    ]
    told = {e["step"] for e in _events(run) if e["event"] == "saved"}
    return max(set.intersection(*steps) | told, default=0)


def begun_at(run: Path) -> list[int]:
    """Behind which step each attempt began, of those that came so far."""
    return [event["step"] for event in _events(run) if event["event"] == "begin"]


def _events(run: Path) -> list[dict[str, Any]]:
    """What the run's folder knows of it; a launcher that was killed may have torn its last line."""
    try:
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def judge_beginning(run: Path, attempts: int, committed: int, verdict: Verdict) -> None:
    """No checkpoint that was whole before an attempt is lost to it."""
    for step in begun_at(run)[attempts:]:
        if step < committed:
            verdict.problems.append(f"it began behind step {step}, step {committed} was committed")


def left_of(on: Stage) -> list[int]:
    """Processes in the hosts beyond those that were there from the beginning, and SSH sessions that time out alone."""
    now = {pid for host in on.rig.hosts for pid in host.pids()} - on.standing
    return [pid for pid in now if words(pid) and not words(pid).startswith(b"sshd")]


def _await_nothing_left(on: Stage, scene: Scene, verdict: Verdict) -> None:
    planted_ones = set(filter(lambda p: b"create_server" in words(p), left_of(on)))  # what take_port holds
    while left := [p for p in left_of(on) if p not in planted_ones]:
        if time.monotonic() - scene.at > STOPPED_WITHIN_S * busy() + 10:
            verdict.problems.append(f"still there: {[words(p)[:80] for p in left]}")
            break
        time.sleep(0.02)
    verdict.stopped_s = time.monotonic() - scene.at


def _judge(scene: Scene, fault: Fault, verdict: Verdict) -> None:
    if verdict.exit_code and not fault.loses_launcher:
        verdict.detected_s = min(
            (at - scene.at for at, line in scene.launcher.lines if any(sign in line for sign in SIGNS)),
            default=verdict.stopped_s,
        )
    failure = scene.run / "failure.json"
    document = json.loads(failure.read_text()) if failure.exists() and verdict.exit_code == 1 else {}
    verdict.reason = document.get("reason") or scene.launcher.said.partition("error:")[2].strip()
    if not verdict.planted:
        if verdict.exit_code:
            verdict.problems.append(f"it failed before the fault: {verdict.reason}")
        return
    if verdict.exit_code and verdict.stopped_s > STOPPED_WITHIN_S * busy():
        verdict.problems.append(f"{verdict.stopped_s:.1f} s until everything had stopped")
    if fault.loses_launcher or verdict.exit_code == 0:
        return
    if verdict.exit_code not in fault.exits:
        verdict.problems.append(f"exit code {verdict.exit_code}: {scene.launcher.said[-300:]}")
    _judge_words(scene, fault, verdict, document.get("host"))


def _judge_words(scene: Scene, fault: Fault, verdict: Verdict, host: str | None) -> None:
    """The cause is named, where it happened, and soon."""
    if fault.causes and not any(word.lower() in verdict.reason.lower() for word in fault.causes):
        verdict.problems.append(f"the cause is not named: {verdict.reason[:300]}")
    if verdict.exit_code not in (1, 4):  # it was asked to end, and says no cause
        return
    if fault.survives and not fault.causes:
        verdict.problems.append(f"it should have gone on: {verdict.reason[:300]}")
    if fault.blames and scene.host.name not in (host or verdict.reason):
        verdict.problems.append(f"{host} is named, it was {scene.host.name}: {verdict.reason[:300]}")
    if fault.crash and (verdict.detected_s or 0.0) > DETECTED_WITHIN_S * busy():
        verdict.problems.append(f"known after {verdict.detected_s:.2f} s only")


def _judge_remains(on: Stage, verdict: Verdict) -> None:
    """No port of a run's is open on any host, and no half-made file is left."""
    for host in on.rig.hosts:
        listening = [line for line in host.run("ss", "-Hltn").stdout.splitlines() if ":22 " not in line]
        if listening:
            verdict.problems.append(f"still listening on {host.name}: {listening[:3]}")
        partial = [str(p) for pattern in HALF_MADE for p in home_of(host).glob(pattern)]
        partial += [str(p) for p in on.text.parent.glob("t*/*")]
        if partial:
            verdict.problems.append(f"half-made on {host.name}: {partial[:3]}")


def _judge_registry(on: Stage, fault: Fault, verdict: Verdict) -> None:
    """A run that could not be verified is on file until `hetctl clean` has verified it; any other one is not."""
    records = on.rig.home / ".local" / "state" / "hetctl" / "active"
    if fault.unverified and list(records.glob("*.json")):
        clean = on.hetctl("clean", "--json")
        if not clean.end(60) or clean.process.returncode:
            verdict.problems.append(f"it cannot be cleaned: {clean.said[-300:]}")
    if left := [p.name for p in records.glob("*.json")]:
        verdict.problems.append(f"still on file: {left}")
