"""Random kills of runs that other engines start, each of which has to end whole, and go on:

    python -m tests.faults.engines ray|slurm|torchrun|kubernetes [--moments 50] [--seed N] [--out FILE]

At a random moment of a run's start, or of its steps, one of its processes is killed or told to end: launcher, shells,
agents, guardians, ranks, whoever is there. Nothing may be left, in the hosts and in the engine, but for what `hetctl
clean` takes away where the launcher itself was lost. The next moment hits the rest of the same run, until it is
complete; its losses are then those of a run that nobody disturbed. The seed repeats the drawing, not the scheduling.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.busy import busy
from tests.faults.plant import environ, role_of, words
from tests.rigs import kubernetes, netns, ray_cluster, slurm
from tests.rigs.cluster import command, environment, write_cluster
from tests.rigs.torchrun import Torchrun

ISLANDS = {"h200": ((0, 1), (1, 1)), "mi325x": ((2, 1),)}
STEPS = 100
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "checkpoint.every=5", "train.timeout_s=15")
START_S, STEPS_S = 8.0, 2.0  # how long a start takes, and of steps so much
ENDED_WITHIN_S, LEFT_WITHIN_S = 90.0, 30.0  # of the kill; of the run's end
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
MARK = ("HETCTL_FAULTS", str(os.getpid()))  # what is started here has it, and what that starts
SCHEDULER_S = 30.0  # after which whoever started a job ends it whose first process has failed


class Engine:
    """hetctl over namespaced hosts that an engine holds; `way` is how `train` is told of it."""

    way: tuple[str, ...] = ()

    def __init__(self, rig: netns.Rig, folder: Path, **more: str) -> None:
        self.rig, self.folder, self.more = rig, folder, dict([*more.items(), MARK])
        self.started: Sequence[subprocess.Popen[bytes] | subprocess.Popen[str]] = ()

    def begin(self, run: str) -> None:
        """Start a run, or go on with it."""
        with (self.folder / f"{run}.out").open("ab") as out:
            env = environment(self.rig, **self.more)
            argv = command(*self.words(run))
            self.started = [subprocess.Popen(argv, cwd=self.folder, env=env, stdout=out, stderr=out)]

    def words(self, run: str) -> tuple[str, ...]:
        keys = [w for key in (*SETTINGS, f"train.steps={STEPS}") for w in ("--set", key)]
        return ("train", "--cluster", "cluster.yaml", "--run-dir", run, *self.way, *keys)

    def hetctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = environment(self.rig, **self.more)
        return subprocess.run(command(*words), cwd=self.folder, env=env, text=True, capture_output=True, timeout=120)

    def over(self) -> bool:
        """Whether what was started has ended."""
        return None not in [process.poll() for process in self.started]  # each of them is asked, and so reaped

    def objects(self) -> list[str]:
        """What the engine itself holds for runs."""
        return []

    def processes(self) -> list[int]:
        """Of runs: on the hosts, and here."""
        mark = "=".join(MARK).encode() + b"\0"
        here = [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in environ(int(name))]
        there = [pid for host in self.rig.hosts for pid in host.pids() if _is_ours(pid)]
        return sorted({*here, *there} - {os.getpid()})


def _is_ours(pid: int) -> bool:
    return b"HETCTL_RUN=" in environ(pid) or b"hetctl" in words(pid)


class Ray(Engine):
    way = ("--launcher", "ray")


class Kubernetes(Engine):
    site: kubernetes.Site

    def objects(self) -> list[str]:
        return self.site.names()


class Slurm(Engine):
    """The launcher is in the job's first node; what is started here has submitted it, and is over."""

    way = ("--launcher", "slurm")
    site: slurm.Site

    def begin(self, run: str) -> None:
        super().begin(run)
        self.started[0].wait(120)

    def over(self) -> bool:
        return not self.objects()

    def objects(self) -> list[str]:
        return self.site.ask("squeue", "--noheader").splitlines()


class ByTorchrun(Engine):
    """One torchrun a host; the first host's launcher leads, so its home says what runs."""

    way = ("--launcher", "none")

    def __init__(self, rig: netns.Rig, folder: Path) -> None:
        super().__init__(rig, folder, XDG_STATE_HOME=str(folder / rig.hosts[0].name))
        self.torchrun, self._failing_since = Torchrun(rig, folder), 0.0

    def begin(self, run: str) -> None:
        with (self.folder / f"{run}.out").open("ab") as out:
            words = ("-m", "hetctl", *self.words(run))
            self.started = self.torchrun.start(*words, processes=(1, 1, 1), out=out, **dict([MARK]))

    def over(self) -> bool:
        """Once a torchrun has failed for a while the others are ended: left alone they wait for it for minutes."""
        if not any(process.poll() for process in self.started):
            self._failing_since = time.monotonic()
        elif time.monotonic() - self._failing_since > SCHEDULER_S:
            for process in self.started:
                process.terminate()
        return super().over()


@contextlib.contextmanager
def engine(name: str, folder: Path) -> Iterator[Engine]:
    """The engine on three hosts, with a folder of a person's that has a cluster.yaml."""
    mine = folder / "mine"
    mine.mkdir()
    with netns.hosts([netns.HostSpec(sshd=False)] * 3, folder / "rig") as rig:
        write_cluster(rig, ISLANDS, mine / "cluster.yaml")
        if name == "ray":
            resources = ({"green": 1}, {"green": 1}, {"red": 2})
            with ray_cluster.ray_cluster(rig, folder / "ray", resources=resources) as ray:
                yield Ray(rig, mine, **ray.environment)
        elif name == "slurm":
            with slurm.slurm(rig, {"green": (0, 1), "red": (2,)}, folder / "slurm") as site:
                made = Slurm(rig, mine, **site.environment)
                made.site = site
                yield made
        elif name == "kubernetes":
            nodes = [kubernetes.GREEN, kubernetes.GREEN, kubernetes.RED]
            with kubernetes.kubernetes(rig, nodes, folder / "kubernetes") as cluster:
                kubernetes.as_pods(mine / "cluster.yaml", kubernetes.PODS)
                pods = Kubernetes(rig, mine, **cluster.environment)
                pods.site = cluster
                yield pods
        else:
            yield ByTorchrun(rig, mine)


ENGINES: dict[str, Callable[[], str]] = {
    "ray": ray_cluster.unavailable,
    "slurm": slurm.unavailable,
    "torchrun": netns.unavailable,
    "kubernetes": kubernetes.unavailable,
}


@dataclass
class Moment:
    """When a process was hit, which, and what became of it all."""

    phase: str  # start or steps
    after_s: float
    signal: str
    victim: str = ""  # its role, or command line where it has none; '': the run was over before
    ended_s: float = 0.0  # from the kill to the end of what was started
    gone_s: float = 0.0  # from there until nothing was left
    cleaned: bool = False  # by `hetctl clean`, which the loss of the launcher asks for
    problems: list[str] = field(default_factory=list)


def hit(on: Engine, run: str, chance: random.Random) -> Moment:
    """One moment of a run, from its start to what is left of it."""
    phase = chance.choice(("start", "steps"))
    number = chance.choice(SIGNALS)
    moment = Moment(phase, round(chance.uniform(0, START_S if phase == "start" else STEPS_S), 2), number.name)
    before = steps_of(on, run)
    on.begin(run)
    if phase == "steps":
        until(lambda: steps_of(on, run) != before or on.over(), ENDED_WITHIN_S)
    time.sleep(moment.after_s)
    for pid in chance.sample(found := on.processes(), len(found)):
        said, role = words(pid).replace(b"\0", b" ").decode(errors="replace").strip(), role_of(pid)
        with contextlib.suppress(ProcessLookupError):
            if said:
                os.kill(pid, number)
                moment.victim = role or said
                break
    judge(on, moment)
    return moment


def judge(on: Engine, moment: Moment) -> None:
    began = time.monotonic()
    if not until(on.over, ENDED_WITHIN_S):
        moment.problems.append(f"it did not end within {ENDED_WITHIN_S:.0f} s")
    moment.ended_s = time.monotonic() - began
    _clean(on, moment)
    if not until(lambda: not on.processes() and not on.objects(), LEFT_WITHIN_S):
        held = [words(pid).replace(b"\0", b" ")[:120].decode(errors="replace") for pid in on.processes()]
        moment.problems.append(f"left: {held} {on.objects()}")
    moment.gone_s = time.monotonic() - began - moment.ended_s
    _clean(on, moment)  # a launcher that still was on its way out then was not cleaned
    if moment.cleaned and on_file(on):
        moment.problems.append("still on file after hetctl clean")


def _clean(on: Engine, moment: Moment) -> None:
    if on_file(on):
        done = on.hetctl("clean", "--json")
        moment.cleaned = True
        if done.returncode:
            moment.problems.append(f"it cannot be cleaned: {done.stderr[-300:]}")


def on_file(on: Engine) -> bool:
    return bool(json.loads(on.hetctl("ps", "--json").stdout)["runs"])


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in that time, on a quiet machine."""
    end = time.monotonic() + seconds * busy()
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def steps_of(on: Engine, run: str) -> int:
    file = on.folder / run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def losses_of(on: Engine, run: str) -> dict[int, set[float]]:
    """What was written down for each step; attempts that made it again may have written it again."""
    found: dict[int, set[float]] = {}
    for line in (on.folder / run / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        found.setdefault(told["step"], set()).add(told["loss"])
    return found


def done(on: Engine, run: str) -> bool:
    file = on.folder / run / "summary.json"
    return file.is_file() and json.loads(file.read_text())["status"] == "done"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--out", type=Path, help="a line of JSON per moment")
    options = parser.parse_args()
    if not netns.ready(ENGINES[options.engine]()):
        return 3
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="he") as folder, engine(options.engine, Path(folder)) as on:
        moments = []
        for moment in hits(on, options.moments, random.Random(options.seed)):
            moments.append(moment)
            print("BAD" if moment.problems else "ok ", summary_of(moment), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(moment)) + "\n")
    return summarise(moments)


def hits(on: Engine, count: int, chance: random.Random) -> Iterator[Moment]:
    """So many moments, in runs that follow one another."""
    undisturbed(on)
    reference, number = losses_of(on, "undisturbed"), 0
    for _ in range(count):
        run = f"run-{number}"
        moment = hit(on, run, chance)
        if done(on, run):
            if losses_of(on, run) != reference:
                moment.problems.append("losses differ from an undisturbed run's")
            number += 1
        elif moment.problems:
            number += 1
        yield moment


def undisturbed(on: Engine) -> None:
    on.begin("undisturbed")
    assert until(on.over, 240), "it does not end"
    assert done(on, "undisturbed"), (on.folder / "undisturbed.out").read_text()


def summary_of(moment: Moment) -> str:
    who = moment.victim[:70] or "nobody: it was over before"
    times = f"ended {moment.ended_s:4.1f} s, gone {moment.gone_s:4.1f} s{', cleaned' if moment.cleaned else ''}"
    return f"{moment.phase} +{moment.after_s:4.2f} s {moment.signal}: {times}: {who}; {'; '.join(moment.problems)}"


def summarise(moments: Sequence[Moment]) -> int:
    """What came of them all, in one line."""
    bad = sum(bool(m.problems) for m in moments)
    hit_ones = [m for m in moments if m.victim]
    who = ", ".join(f"{count} {role[:70]}" for role, count in Counter(m.victim for m in hit_ones).most_common())
    ended, gone = ([getattr(m, key) for m in hit_ones] or [0.0] for key in ("ended_s", "gone_s"))
    print(
        f"{len(moments)} moments, {len(hit_ones)} hit a process ({who}), {bad} bad; ended after"
        f" {statistics.median(ended):.1f} s (at most {max(ended):.1f}), all gone {statistics.median(gone):.1f} s later"
        f" (at most {max(gone):.1f}), {sum(m.cleaned for m in moments)} by hetctl clean"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
