"""Runs that go on: from the last checkpoint after a crash, on the hosts that remain, and not for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster, Device, Host, Island, IslandLink, Member
from hetctl.comm.contract.errors import ConfigError, Infeasible, Unreachable
from hetctl.launcher.run_folder.registry import OnFile, active
from hetctl.launcher.supervisor.agents import refusal
from hetctl.runs import train
from hetctl.runs.restarts import Restarts, unreachable_hosts, without
from tests.rigs import netns
from tests.rigs.cluster import ROOT, command, environment, losses, write_cluster

SETTINGS = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "checkpoint.every=2")


def cluster() -> Cluster:
    hosts = tuple(Host(n, devices=(Device(0, v, "x"),)) for n, v in (("a", "nvidia"), ("b", "nvidia"), ("c", "amd")))
    islands = (
        Island("green", "nvidia", "f", (Member("a", 0), Member("b", 0))),
        Island("red", "amd", "f", (Member("c", 0),)),
    )
    return Cluster(hosts, islands, links=(IslandLink(("green", "red"), ()),))


def test_what_remains_of_a_cluster() -> None:
    left = without(cluster(), {"b"})
    assert [(i.name, len(i.members)) for i in left.islands] == [("green", 1), ("red", 1)]
    assert len(left.links) == 1
    left.validate(where="left")
    alone = without(cluster(), {"c"})
    assert [i.name for i in alone.islands] == ["green"]
    assert alone.links == ()
    with pytest.raises(Infeasible):
        without(cluster(), {"a", "b", "c"})


def test_attempts_end_when_used_up_or_without_progress() -> None:
    attempts = Restarts(5, False)
    for start in (None, "step-2", "step-2"):
        attempts.began(start)
        assert attempts.why_not_again() is None
    attempts.began("step-2")
    assert "did not get to the next" in str(attempts.why_not_again())
    assert Restarts(0, False).why_not_again() == ""
    assert "put right first" in str(Restarts(5, False).why_not_again("ConfigError"))
    assert "used up" in str(Restarts(2, False, used=2).why_not_again())


def test_only_unreachable_hosts_may_be_missing() -> None:
    gone = refusal({"b": Unreachable("no answer")}, 3)
    assert gone.exit_code == 4
    assert unreachable_hosts(gone) == {"b": "no answer"}
    both = refusal({"b": Unreachable("no answer"), "c": ConfigError("no torch")}, 3)
    assert unreachable_hosts(both) == {}
    assert unreachable_hosts(refusal({"a": Unreachable("x")}, 1)) == {"a": "x"}  # a run needs another to go on


def test_a_run_is_on_file_between_its_attempts_and_off_it_where_no_other_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever follows its logs follows the next attempt, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    begin, see_through, on_file = train.start_agents_on, train.Attempt.train, list[int]()

    def begun(*args: Any, **named: Any) -> Any:
        on_file.append(len(active()))
        if len(on_file) > 1:
            raise Unreachable("no answer")
        return begin(*args, **named)

    def failed(attempt: Any, place: OnFile) -> Any:
        summary, *others = see_through(attempt, place)
        return replace(summary, status="failed", failure="planted"), *others

    monkeypatch.setattr(train, "start_agents_on", begun)
    monkeypatch.setattr(train.Attempt, "train", failed)
    argv = ["train", "--emulate", "h200:1,mi325x:1", "--model", "demo", "--max-restarts", "1", "--no-check-parity"]
    result = CliRunner().invoke(app, [*argv, "--set", "train.steps=1"])
    assert isinstance(result.exception, Unreachable)
    assert on_file == [0, 1]
    assert active() == []


@pytest.mark.slow
def test_a_crash_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    words = [w for key in (*SETTINGS, "train.steps=40") for w in ("--set", key)]
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", "h200:1,mi325x:1", "--max-restarts", "1"]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*argv, "--run-dir", str(run), *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    victim = 0
    until = time.monotonic() + 240
    while not victim and time.monotonic() < until:
        time.sleep(0.05)
        if any((run / "checkpoints").glob("step-*/manifest.json")):
            victim = rank_process(run, 1)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "restart 1 of 1" in errors
    assert json.loads((run / "summary.json").read_text())["restarts"] == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 41))
    again = dict(zip(steps, losses(run), strict=True))
    first = dict(zip(steps[::-1], losses(run)[::-1], strict=True))
    assert again == first, "steps that were done twice came to the same"


def rank_process(run: Path, rank: int) -> int:
    mark = str(run / "launch" / "job.json").encode()
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and b"HETCTL_JOB=" + mark in variables:
            return int(entry.name)
    return 0


@pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable())
def test_missing_hosts_are_planned_around_where_that_is_allowed(tmp_path: Path) -> None:
    specs = [netns.HostSpec(), netns.HostSpec(sshd=False), netns.HostSpec()]
    with netns.hosts(specs, tmp_path / "rig") as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1), (2, 1))}, tmp_path / "cluster.yaml")
        words = [w for key in (*SETTINGS, "train.steps=2") for w in ("--set", key)]
        argv = command("train", "--cluster", "cluster.yaml", "--run-dir", "run", *words)
        kwargs = {"cwd": tmp_path, "env": environment(rig), "text": True, "capture_output": True, "timeout": 120}
        refused = subprocess.run(argv, **kwargs)  # type: ignore[call-overload]
        assert refused.returncode == 4
        done = subprocess.run([*argv, "--allow-missing"], **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert f"going on without {rig.hosts[1].name}" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["missing_hosts"]) == [rig.hosts[1].name]
    assert {tuple(i["ranks"]) for i in summary["islands"]} == {(0,), (1,)}
