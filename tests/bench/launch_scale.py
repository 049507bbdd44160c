"""What a launch costs on many hosts: start, report, lose ten, name them, end, and nothing left.

    python -m tests.bench.launch_scale [--hosts 16 64 256 1000] [--ranks 1] [--lose 10]

A host is an agent of its own on this machine, with its own state folder, processes and 127.x.y.z; its ranks are shells
that report once, then sleep. Half of the lost hosts lose their agent (its guardian says so), half everything at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import psutil

from hetctl.comm.contract.cluster import Access, Cluster, Device, Host, Island, Member
from hetctl.comm.contract.events import Begin, Gone, Lost, Told
from hetctl.comm.contract.units import MiB
from hetctl.launcher.agent.bootstrap import marked
from hetctl.launcher.engines import entrance
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import OnFile, on_file
from hetctl.launcher.supervisor import host_specs
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.launch import Launch, start_agents_on
from hetctl.launcher.supervisor.supervise import supervise
from hetctl.launcher.supervisor.supervisor import RunOutcome

REPORT = """echo '{"event": "begin", "step": 0, "steps": 1}' > /proc/self/fd/$HETCTL_EVENTS_FD; exec sleep 3600"""
STEADY_S = 10.0


class Here(Engine):
    """An engine whose hosts are all this machine, each with its own home."""

    def __init__(self, home: Path, cache: Path) -> None:
        self.home, self.cache = home, cache

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """It has any host."""

    def open(self, place: Place, deadline: Deadline) -> LocalShell:
        state = f"XDG_STATE_HOME={self.home / place.name}"
        idle = "chrt", "--idle", "0"  # who supervises has a machine of its own elsewhere
        own = "unshare", "--pid", "--fork", "--mount-proc"  # a host sees its own processes only
        return LocalShell(("env", state, f"XDG_CACHE_HOME={self.cache}", *idle, *own))

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def many_hosts(home: Path, cache: Path) -> Iterator[None]:
    """`--launcher here`, as long as the block lasts; the hosts' homes are in `home`, hetctl's code in `cache`."""
    # hosts that share two cores answer late, which real ones do not
    patience = {"agent_link.SILENT_S": 60.0, "host_specs.LEASE_S": 120.0, "launch.LEASE_S": 120.0}
    with ExitStack() as stack:
        for name, seconds in patience.items():
            stack.enter_context(mock.patch(f"hetctl.launcher.supervisor.{name}", seconds))
        stack.enter_context(mock.patch.dict(cast("dict[str, Any]", entrance.ENGINES), here=lambda: Here(home, cache)))
        yield


def cluster_of(hosts: int, ranks: int) -> Cluster:
    """Two islands, half of the hosts in each; a host has as many devices as ranks."""
    rows = []
    for n in range(hosts):
        vendor, model = ("nvidia", "h200") if n < hosts // 2 else ("amd", "mi325x")
        devices = tuple(Device(i, vendor, model, 1 << 30) for i in range(ranks))
        address = f"127.1.{n // 250}.{n % 250 + 1}"
        rows.append(Host(f"node{n:04}", Access(python=sys.executable), address, devices=devices))
    parts = rows[: hosts // 2], rows[hosts // 2 :]
    members = [tuple(Member(h.name, d.index) for h in part for d in h.devices) for part in parts]
    islands = (Island("h200", "nvidia", "here", members[0]), Island("mi325x", "amd", "here", members[1]))
    return Cluster(tuple(rows), islands, source="emulated", runs="gloo")


class Quiet:
    def say(self, text: str) -> None:
        """Nobody listens."""

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr)


class Run:
    """One launch on simulated hosts: what happens when, and what it costs the process that supervises it."""

    def __init__(self, hosts: int, ranks: int, lose: int, home: Path) -> None:
        self.hosts, self.ranks, self.lose, self.home = hosts, ranks, lose, home
        self.me = psutil.Process()
        self.begun, self.ready, self.named = 0, 0, set[str]()
        self.kinds: Counter[str] = Counter()
        self.working = threading.Event()
        self.at: dict[str, float] = {}
        self.figures: dict[str, Any] = {"hosts": hosts, "ranks": hosts * ranks}
        self.victims: list[str] = []

    def go(self) -> dict[str, Any]:
        self.mark("start")
        folder = RunFolder(self.home / "runs" / "scale")
        folder.path.mkdir(parents=True)
        ranks = Launch.of(cluster_of(self.hosts, self.ranks), way="here")
        with on_file(folder) as place:
            outcome = self.see_through(ranks, place)
        self.mark("ended")
        assert self.working.is_set(), f"{self.begun} of {self.hosts * self.ranks} ranks reported"
        assert self.named == set(self.victims), (sorted(self.named), self.victims)
        assert len(self.named) == self.lose, self.named
        assert outcome.left == 0, outcome.left
        assert len(outcome.exits) == self.hosts * self.ranks, len(outcome.exits)
        until = time.monotonic() + 20
        while (left := marked(folder.identity)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, f"{len(left)} processes are left"
        self.figures["processes_left"] = len(left)
        return self.figures

    def see_through(self, ranks: Launch, place: OnFile) -> RunOutcome:
        agents = start_agents_on(ranks, place, console=Quiet())
        self.mark("agents")
        work = host_specs.Work(("/bin/sh", "-c", REPORT))
        specs = host_specs.host_specs(agents, ranks, work, run=place.folder.identity)
        self.mark("specs")
        threading.Thread(target=self.lose_some, args=(place.folder.identity, agents), daemon=True).start()
        return supervise(agents, specs, self.take, place=place, say=Quiet().warn)

    def mark(self, name: str) -> None:
        now, used = time.monotonic(), self.me.cpu_times()
        cpu = used.user + used.system
        if self.at:
            self.figures[f"{name}_s"] = round(now - self.at["_"], 2)
            self.figures[f"{name}_cpu_s"] = round(cpu - self.at["cpu"], 2)
        self.at |= {"_": now, "cpu": cpu}

    def take(self, told: Told) -> None:
        self.kinds[told.event.kind] += 1
        match told.event:
            case Begin():
                self.begun += 1
                if self.begun == self.hosts * self.ranks:
                    self.working.set()
            case Lost() | Gone(finished=False):
                if not self.victims:
                    print("lost by itself:", told, file=sys.stderr)
                if told.host in self.victims:
                    self.named.add(told.host)
                    if len(self.named) == self.lose:
                        self.figures["named_s"] = round(time.monotonic() - self.at["lost"], 2)

    def lose_some(self, run: str, agents: Agents) -> None:
        assert self.working.wait(300), f"{self.begun} of {self.hosts * self.ranks} ranks reported"
        self.mark("reported")
        trees = self.trees(run)
        self.measure(list(trees.values()))
        self.mark("measured")
        time.sleep(STEADY_S)
        self.mark("steady")
        step = max(1, self.hosts // max(1, self.lose))
        self.victims = [s.name for s in agents.sites[1::step]][: self.lose]
        self.at["lost"] = time.monotonic()
        # of every second host the agent alone; by a program that does nothing else: what is heard of the first ends all
        pids = [pid for n, name in enumerate(self.victims) for pid in (trees[name][1:2] if n % 2 else trees[name])]
        subprocess.run(["/bin/kill", "-KILL", *map(str, pids)], check=True)

    def trees(self, run: str) -> dict[str, list[int]]:
        """Per host its guardian, its agent and their children."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        found = {}
        shells = [guardian for shell in children[self.me.pid] for guardian in children.get(shell.pid, [])]
        for guardian in shells:
            state = guardian.environ()
            if state.get("HETCTL_RUN") == run:
                agents = children[guardian.pid]
                ranks = [rank.pid for agent in agents for rank in children.get(agent.pid, [])]
                found[Path(state["XDG_STATE_HOME"]).name] = [guardian.pid, *(a.pid for a in agents), *ranks]
        return found

    def measure(self, trees: Sequence[Sequence[int]]) -> None:
        """Memory of the supervisor, and of some agents with their guardians."""
        sample = trees[:: max(1, len(trees) // 16)]
        full = [[psutil.Process(pid).memory_full_info() for pid in tree[:2]] for tree in sample]
        pss = [sum(m.pss for m in pair) / MiB for pair in full]
        self.figures |= {
            "supervisor_rss_mib": round(self.me.memory_info().rss / MiB, 1),
            "supervisor_threads": self.me.num_threads(),
            "supervisor_fds": self.me.num_fds(),
            "agent_rss_mib": round(sum(p[1].rss for p in full) / len(full) / MiB, 1),
            "agent_and_guardian_pss_mib": round(sum(pss) / len(pss), 1),
            "agent_and_guardian_uss_mib": round(sum(m.uss for p in full for m in p) / len(full) / MiB, 1),
            "used_gib": round(psutil.virtual_memory().used / 2**30, 2),
        }


def once(hosts: int, ranks: int, lose: int, cache: Path) -> dict[str, Any]:
    """One run, and its figures; the hosts have hetctl's code if an earlier run had the same `cache`."""
    with tempfile.TemporaryDirectory(prefix="scale") as name, many_hosts(Path(name), cache):
        os.environ["XDG_STATE_HOME"] = name  # the register of runs
        return Run(hosts, ranks, lose, Path(name)).go()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--lose", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="code") as cache:
        for hosts in (2, *options.hosts):  # the first one's code is shipped, and compiled
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                asked = hosts, options.ranks, min(options.lose, hosts // 2), Path(cache)
                print(json.dumps(pool.apply(once, asked)), flush=True)


if __name__ == "__main__":
    main()
