"""`hetctl run` on real hosts with small programs: values arrive unharmed, faults are named, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.cluster import Nic, load_cluster, save_cluster
from tests.busy import busy
from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
HOSTILE = {"QUOTES": 'it\'s "$(touch /tmp/harm)" `id`', "LINES": "one\ntwo", "DASH": "--version", "EMPTY": ""}
HOSTILE |= {"A $(id) NAME": "x", "-DASHED": "y", "TWO\nLINES": "z", "`QUOTED'\"": "q"}
ISLANDS = {"h200": ((0, 1),), "mi325x": ((1, 2),)}
# each rank leaves a child in a session of its own, says that it is up, and waits until it is asked to end
PROGRAM = """
import json, os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
wanted = json.loads(sys.argv[1]) if len(sys.argv) > 1 else []
print("UP", json.dumps({name: os.environ.get(name) for name in wanted}), flush=True)
if sys.argv[2:] == ["flood"]:
    for n in range(200_000):
        print("x" * 100)
    raise ValueError("the reason")
if sys.argv[2:] != ["end"]:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "program").mkdir()
    (folder / "program" / "up.py").write_text(PROGRAM)
    (folder / "program" / ".env").write_text("a secret")
    return folder


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[netns.Rig]:
    with netns.hosts(
        [netns.HostSpec(hide=(str(mine),)) for _ in range(2)], tmp_path_factory.mktemp("rig"), rails=1
    ) as rig:
        write_cluster(rig, ISLANDS, mine / "cluster.yaml")
        yield rig


class Running:
    """A `hetctl run` in the background."""

    def __init__(self, rig: netns.Rig, mine: Path, name: str, *words: str, cluster: str = "cluster.yaml") -> None:
        self.rig, self.folder = rig, mine / name
        argv = command("run", "--cluster", cluster, "--run-dir", name, "--", "python", "program/up.py", *words)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, cwd=mine, env=environment(rig, HF_TOKEN="hf_secret"), text=True, stdout=pipe, stderr=pipe
        )

    @property
    def identity(self) -> str:
        return (self.folder / "launch" / "identity").read_text()

    def left(self) -> list[tuple[int, str]]:
        """Processes in the hosts that carry the run's mark, with their command lines."""
        found = []
        for pid in (pid for host in self.rig.hosts for pid in host.pids()):
            try:
                if f"HETCTL_RUN={self.identity}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except OSError:
                continue
        return found

    def up(self, ranks: int = 3) -> Running:
        wait_for(lambda: sum("UP" in log.read_text() for log in self.folder.glob("logs/rank-*.log")) == ranks)
        return self

    def pids(self, part: str) -> list[int]:
        return [pid for pid, words in self.left() if part in words]

    def end(self, seconds: float = 60) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors

    def failure(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "failure.json").read_text())
        return document


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return value


def test_values_arrive_as_they_are_and_secrets_show_nowhere(rig: netns.Rig, mine: Path) -> None:
    cluster = load_cluster(mine / "cluster.yaml")
    env = {**HOSTILE, "HF_TOKEN": None}
    hosts = tuple(replace(h, access=replace(h.access, env=env)) for h in cluster.hosts if h.access)
    save_cluster(mine / "hostile.yaml", replace(cluster, hosts=hosts))
    run = Running(rig, mine, "a $(touch harm) 'b", json.dumps([*HOSTILE, "HF_TOKEN"]), cluster="hostile.yaml").up()
    shown = [(log, json.loads(log.read_text().partition("UP ")[2])) for log in run.folder.glob("logs/rank-*.log")]
    assert [values for _, values in shown] == [{**HOSTILE, "HF_TOKEN": "hf_secret"}] * 3
    assert not any("hf_secret" in words for _, words in run.left())
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    assert run.left() == []
    assert not Path("/tmp/harm").exists()
    assert not list(mine.rglob("harm"))
    kept = [p for home in (mine, *(h.folder / "home" for h in rig.hosts)) for p in home.rglob("*") if p.is_file()]
    telling = [p for p in kept if b"hf_secret" in p.read_bytes() and p.suffix != ".log"]
    assert telling == [], "only the program's own output may hold it"
    assert not [p for p in kept if p.name == ".env" and mine not in p.parents]
    assert oct((run.folder / "logs").stat().st_mode & 0o777) == "0o700"
    folders = [p for h in rig.hosts for p in (h.folder / "home").glob(".local/state/hetctl/runs/*/*")]
    assert [oct(p.stat().st_mode & 0o777) for p in folders] == ["0o700"] * 2


def test_ranks_start_inside_a_container(mine: Path, tmp_path: Path) -> None:
    """The prefix is a stand-in for docker that shows in the environment that it was gone through."""
    docker = '#!/bin/sh\n[ "$1 $2 $3" = "exec -i box" ] || exit 9\nshift 3\nINSIDE=yes exec "$@"\n'
    specs = [netns.HostSpec(tools={"docker": docker}, hide=(str(mine),)) for _ in range(2)]
    with netns.hosts(specs, tmp_path, rails=1) as rig:
        cluster = write_cluster(rig, ISLANDS, mine / "boxes.yaml")
        prefix = ("docker", "exec", "-i", "box")
        hosts = tuple(replace(h, access=replace(h.access, prefix=prefix)) for h in cluster.hosts if h.access)
        save_cluster(mine / "boxes.yaml", replace(cluster, hosts=hosts))
        run = Running(rig, mine, "boxes", '["INSIDE"]', "end", cluster="boxes.yaml")
        assert run.end()[0] == 0
        assert all('"INSIDE": "yes"' in log.read_text() for log in run.folder.glob("logs/rank-*.log"))
        assert run.left() == []


def test_a_killed_rank_ends_everybody_soon_and_is_named(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "killed").up()
    other = Running(rig, mine, "neighbour").up()
    began = time.monotonic()
    victim = next(p for p in run.pids("up.py") if b"RANK=2\0" in Path(f"/proc/{p}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    code, errors = run.end()
    assert (code, time.monotonic() - began < 8 * busy()) == (1, True)
    assert f"rank 2 on {rig.hosts[1].name} failed first" in errors
    assert "SIGKILL" in run.failure()["reason"]
    assert run.left() == []
    assert len(other.pids("up.py")) == 3, "another run on the same hosts is not touched"
    other.process.send_signal(signal.SIGINT)
    assert other.end()[0] == 130


def test_a_killed_agent_takes_everything_of_its_host_along(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "agent").up()
    agents = [p for p in run.pids("launcher.agent") if p in rig.hosts[1].pids()]
    os.kill(max(agents), signal.SIGKILL)  # the guardian is the older one
    code, errors = run.end()
    assert code == 1
    assert "agent was killed" in run.failure()["reason"], errors
    assert run.failure()["host"] == rig.hosts[1].name
    wait_for(lambda: run.left() == [], 5 * busy())


def test_a_dropped_connection_comes_back(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "drop").up()
    ranks = run.pids("up.py")
    for pid in rig.hosts[0].pids():
        if b"sshd: root@" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(4)
    assert run.pids("up.py") == ranks
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    assert json.loads((run.folder / "summary.json").read_text())["processes_left"] == 0
    assert run.left() == []


def test_a_lost_launcher_and_a_partition_end_with_the_lease(rig: netns.Rig, mine: Path) -> None:
    """Two runs at once, because leases take their time: one loses its launcher, the other the way to a host."""
    lost, cut = Running(rig, mine, "lost").up(), Running(rig, mine, "cut").up()
    lost.process.kill()
    bridge = f"{rig.hosts[0].namespace[:-2]}v1"
    subprocess.run(["ip", "link", "set", bridge, "down"], check=True)
    began = time.monotonic()
    try:
        code, errors = cut.end(150)
        assert code == 1
        assert f"{rig.hosts[1].name} stopped answering" in errors
        assert cut.failure()["unverified_hosts"] == [rig.hosts[1].name]
        wait_for(lambda: lost.left() + cut.left() == [], max(1.0, 25 * busy() - (time.monotonic() - began)))
    finally:
        subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
    listed = hetctl(rig, mine, "ps", "--json")
    assert {r["run"]: r["state"] for r in json.loads(listed.stdout)["runs"]} == {"lost": "lost", "cut": "lost"}
    done = hetctl(rig, mine, "clean")
    assert done.returncode == 0, done.stderr
    assert json.loads(hetctl(rig, mine, "ps", "--json").stdout) == {"runs": []}


def test_what_a_run_left_is_found_by_its_mark(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "orphans").up()
    run.process.kill()
    guardians = run.pids("launcher.agent")
    for pid in sorted(guardians):  # guardian and agent at once: what ranks started themselves is orphaned
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.pids("up.py") == [])
    assert len(run.pids("sleep")) == 3
    done = hetctl(rig, mine, "clean", "orphans", "--json")
    hosts = json.loads(done.stdout)["cleaned"]["orphans"].values()
    assert sum(h["found"] for h in hosts) >= 3  # these hosts see each other's processes
    assert [h["left"] for h in hosts] == [0, 0]
    assert run.left() == []


def test_detached_runs_are_listed_followed_and_stopped(rig: netns.Rig, mine: Path) -> None:
    words = ("--cluster", "cluster.yaml", "--run-dir", "away", "--detach", "--", "python", "program/up.py")
    assert hetctl(rig, mine, "run", *words).returncode == 0
    wait_for(lambda: sum("UP" in p.read_text() for p in (mine / "away").glob("logs/rank-*.log")) == 3)
    assert "[2] UP" in hetctl(rig, mine, "logs", "away").stdout
    argv, env = command("logs", "-f", "away"), environment(rig)
    follower = subprocess.Popen(argv, cwd=mine, env=env, text=True, stdout=subprocess.PIPE)
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start what is behind `&` deaf
    left = subprocess.Popen(argv, cwd=mine, env=env, text=True, stdout=subprocess.PIPE, preexec_fn=heard)
    assert left.stdout is not None
    assert "UP" in left.stdout.readline()
    left.send_signal(signal.SIGINT)
    assert left.wait(30) == 0, "leaving is no failure, and no end of the run"
    assert json.loads(hetctl(rig, mine, "ps", "--json").stdout)["runs"][0]["state"] == "running"
    assert hetctl(rig, mine, "stop").returncode == 0, "it is the only one"
    assert "[2] UP" in follower.communicate(timeout=400)[0]
    assert hetctl(rig, mine, "stop").returncode == 2
    assert json.loads((mine / "away" / "summary.json").read_text())["status"] == "interrupted"


def test_a_flood_is_bounded_and_the_cause_still_seen(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "flood", "[]", "flood")
    code, _ = run.end()
    assert code == 1
    logs = list(run.folder.glob("logs/rank-*.log"))
    assert all(log.stat().st_size < 2 << 20 for log in logs), "20 MB were printed by each"
    assert any("ValueError: the reason" in log.read_text() for log in logs)


def test_an_agent_that_somebody_stopped_is_ended_by_its_guardian(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "frozen").up()
    agents = [p for p in run.pids("launcher.agent") if p in rig.hosts[1].pids()]
    os.kill(max(agents), signal.SIGSTOP)
    code, errors = run.end()
    assert code == 1
    assert run.failure()["host"] == rig.hosts[1].name, errors
    assert "agent" in run.failure()["reason"]
    wait_for(lambda: run.left() == [], 5 * busy())


def test_one_run_has_one_launcher(rig: netns.Rig, mine: Path) -> None:
    run = Running(rig, mine, "claimed").up()
    code, errors = Running(rig, mine, "claimed").end()
    assert code == 2
    assert f"process {run.process.pid} supervises" in errors
    assert len(run.pids("up.py")) == 3
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143


@pytest.mark.slow
def test_a_rail_that_goes_down_is_named_within_a_minute(mine: Path, tmp_path: Path) -> None:
    with netns.hosts([netns.HostSpec(hide=(str(mine),)) for _ in range(2)], tmp_path, rails=2) as rig:
        cluster = write_cluster(rig, ISLANDS, mine / "rails.yaml")
        nics = ("rail0", "rail1")
        hosts = tuple(
            replace(h, nics=tuple(map(Nic, nics)), devices=tuple(replace(d, nics=nics) for d in h.devices))
            for h in cluster.hosts
        )
        save_cluster(mine / "rails.yaml", replace(cluster, hosts=hosts))
        run = Running(rig, mine, "rails", cluster="rails.yaml").up()

        def links() -> list[tuple[str, str, str | None]]:
            events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
            return [(e["host"], e["nic"], e["problem"]) for e in events if e["event"] == "link"]

        victim = rig.hosts[1]
        assert links() == []
        subprocess.run(["ip", "-n", victim.namespace, "link", "set", "rail1", "down"], check=True)
        wait_for(links)
        subprocess.run(["ip", "-n", victim.namespace, "link", "set", "rail1", "up"], check=True)
        wait_for(lambda: len(links()) > 1, 60 * busy())
        run.process.send_signal(signal.SIGTERM)
        _, errors = run.end()
    assert links()[0] == (victim.name, "rail1", "down (down)")
    assert f"{victim.name}: rail1 is down" in errors
    summary = json.loads((run.folder / "summary.json").read_text())
    assert [(x["host"], x["nic"]) for x in summary["links"]][:1] == [(victim.name, "rail1")]


def hetctl(rig: netns.Rig, mine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=mine, env=environment(rig), text=True, capture_output=True, timeout=400)
