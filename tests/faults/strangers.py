"""Strangers at the ports of running jobs: python -m tests.faults.strangers [--only WORD] [--out FILE]. Needs root.

Each kind of stranger calls at each kind of port in each phase of a run over two islands of two namespaced hosts, from a
third host on their network, or (`--inside`) from a host of the run. Every run must end well with the losses of an
undisturbed one. With `--blocks` strangers come and go within each run: a block of steps with them is held against
those before and after it, since two runs one after the other differ by more than strangers cost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.drive import END_S, Stage, Verdict, home_of, stage, steps_of
from tests.faults.judge import judge_losses
from tests.faults.plant import Launcher, role_of, words
from tests.faults.stranger import AT_ONCE
from tests.rigs import netns

KINDS = tuple(AT_ONCE)
PHASES = ("startup", "run", "save", "end")
STEPS = 40
SETTINGS = (f"checkpoint.every={STEPS // 4}", "train.timeout_s=30")
BLOCK, SETTLE, BLOCKS = 25, 8, 17  # steps of a block, those of its beginning that do not count, blocks of a run
IN_BLOCKS = (f"checkpoint.every={BLOCK}", "train.timeout_s=30")
CORES = os.sched_getaffinity(0)
THEIRS = {max(CORES)}  # strangers have machines of their own, and who watches a run is no part of it
OURS = CORES - THEIRS or CORES
LOOK_S = 0.1
PROGRAM = Path(__file__).with_name("stranger.py")


@dataclass(frozen=True)
class Port:
    """A listening socket of a run: whose, and where it is bound."""

    role: str
    place: str  # address:port


def ports_of(hosts: Sequence[netns.RigHost], standing: frozenset[int] | set[int] = frozenset()) -> set[Port]:
    """Every TCP port that a run's processes listen at, on all hosts."""
    found = set()
    for host in hosts:
        roles = {pid: holder_of(pid) for pid in host.pids() if pid not in standing}
        listening = dict(itertools.chain.from_iterable(map(listening_of, list(roles)[:1])))
        for pid, role in roles.items():
            found |= {Port(role, listening[inode]) for inode in sockets_of(pid) & set(listening) if role}
    return found


def listening_of(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, address:port) of each TCP socket that listens in a process's network."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for words_ in map(str.split, Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]):
                (address, port), state, inode = words_[1].split(":"), words_[3], words_[9]
                if state == "0A":
                    packed = b"".join(bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8))
                    yield inode, f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"


def sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
    return found


def holder_of(pid: int) -> str:
    """Of a process that may listen; '' for one of SSH or of the rig."""
    said = words(pid)
    return role_of(pid) or ("" if not said or b"sshd" in said or b"stranger.py" in said else "other")


@dataclass
class Attack:
    """One run under strangers, and what became of both."""

    kind: str
    role: str
    phase: str
    problems: list[str] = field(default_factory=list)
    tried: int = 0
    connected: int = 0
    answered: int = 0
    ports: int = 0
    slower: list[float] = field(default_factory=list)  # each block's step, against those of the blocks beside it


def attack(
    on: Stage, made: Attack, recorded: Mapping[str, Sequence[str]], *, inside: bool, blocks: bool = False
) -> Attack:
    """One run that strangers of one kind call at while its phase lasts, in every other block of steps if `blocks`.
    Never raises for what the run did."""
    run, caller = on.fresh(), on.rig.hosts[0 if inside else 2]
    with on_cores(OURS):
        launcher = on.start(run)
    seen, told = set[str](), dict[str, list[str]]()
    with on_cores(THEIRS), strangers(caller, made.kind) as process:
        began = time.monotonic()
        while launcher.process.poll() is None and time.monotonic() - began < END_S:
            here = [p for p in ports_of(on.rig.hosts[:2], on.standing) if made.role in ("", p.role)]
            now = in_phase(on, run, made.phase) and not (blocks and steps_of(run) // BLOCK % 2 == 0)
            targets = {p.place: list(recorded.get(p.role, ())) for p in here} if now else {}
            seen |= set(targets)
            if targets != told:
                told = targets
                tell(process, targets)
            time.sleep(LOOK_S)
        if not launcher.end(5.0):
            made.problems.append(f"it did not end within {END_S:.0f} s: {launcher.said[-300:]}")
    counts = json.loads(process.communicate()[0] or "{}").values()
    made.tried, made.connected, made.answered = (sum(count[n] for count in counts) for n in range(3))
    made.ports = len(seen)
    judge(on, run, launcher, made)
    if blocks and not made.problems:
        made.slower = slower(run)
    return made


def judge(on: Stage, run: Path, launcher: Launcher, made: Attack) -> None:
    verdict = Verdict("", "", 0)
    if launcher.process.returncode:
        made.problems.append(f"exit {launcher.process.returncode}: {launcher.said[-400:]}")
    judge_losses(on, run, verdict)
    made.problems += verdict.problems


def slower(run: Path) -> list[float]:
    """Of each block with strangers: the time of a step against that of the blocks before and after it, by medians."""
    seconds = [json.loads(line)["step_time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    blocks = [statistics.median(seconds[n + SETTLE : n + BLOCK]) for n in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    return [2 * to / (a + b) for a, to, b in zip(blocks[::2], blocks[1::2], blocks[2::2], strict=False)]


def in_phase(on: Stage, run: Path, phase: str) -> bool:
    if not phase:
        return True
    steps = steps_of(run)
    if phase == "save":
        runs = home_of(on.rig.hosts[0]) / ".local" / "state" / "hetctl" / "runs"
        return 0 < steps < on.steps and any(runs.glob("*/*/checkpoints/*.partial"))
    return {"startup": steps == 0, "run": 0 < steps < on.steps, "end": steps >= on.steps}[phase]


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This process, and those that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def strangers(host: netns.RigHost, kind: str) -> Iterator[subprocess.Popen[str]]:
    there = ["ip", "netns", "exec", host.namespace, "taskset", "-c", str(*THEIRS)]
    argv = [*there, netns.PYTHON, "-S", str(PROGRAM), kind]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    except BaseException:
        process.kill()
        raise


def tell(process: subprocess.Popen[str], targets: Mapping[str, Sequence[str]]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(targets) + "\n")
        process.stdin.flush()


def open_ports(on: Stage) -> set[Port]:
    """Every port that an undisturbed run listens at, from its start to its end."""
    found = set[Port]()
    launcher = on.start(on.fresh())
    while launcher.process.poll() is None:
        found |= ports_of(on.rig.hosts[:2], on.standing)
        time.sleep(LOOK_S)
    return found


def recordings(on: Stage) -> dict[str, list[str]]:
    """What the processes of an undisturbed run send to the ports of each role."""
    found = dict[str, list[str]]()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(strangers(host, "listen")) for host in on.rig.hosts[:2]]
        roles = {port.place: port.role for port in open_ports(on)}
    for listener in listeners:
        for place, streams in json.loads(listener.communicate("\n")[0]).items():
            if place in roles:
                found.setdefault(roles[place], []).extend(text for text in streams if text)
    return {role: streams[:64] for role, streams in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases with this word")
    parser.add_argument("--whole", action="store_true", help="all ports and phases at once, one run a kind")
    parser.add_argument("--blocks", action="store_true", help="what they cost: in every other block of a run's steps")
    parser.add_argument("--inside", action="store_true", help="from a host of the run")
    parser.add_argument("--out", type=Path, help="a line of JSON per run")
    options = parser.parse_args()
    if not netns.ready():
        return 3
    chosen = [case for case in cases(options.whole, options.blocks) if options.only in " ".join(case)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cores(OURS))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hs"))
        steps, settings = (BLOCK * BLOCKS, IN_BLOCKS) if options.blocks else (STEPS, SETTINGS)
        on = stack.enter_context(stage(Path(folder) / "rig", steps=steps, settings=settings, others=1))
        recorded = recordings(on) if any(case[0] == "replay" for case in chosen) else {}
        bad = 0
        for case in chosen:
            made = attack(on, Attack(*case), recorded, inside=options.inside, blocks=options.blocks)
            bad += bool(made.problems)
            print(line(made), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(made)) + "\n")
    return int(bad > 0)


ROLES = ("store", "agent", "rank")


def cases(whole: bool, blocks: bool) -> list[tuple[str, str, str]]:
    """(kind, role, phase), '' for all. In blocks one comes first that calls at nobody: its difference is noise."""
    if blocks:
        return [("stay", "nobody", "run"), *itertools.product(KINDS, ("", *ROLES), ("run",))]
    return [(kind, "", "") for kind in KINDS] if whole else list(itertools.product(KINDS, ROLES, PHASES))


def line(made: Attack) -> str:
    what = f"{made.kind:9} {made.role or 'all':6} {made.phase or 'all':8} {made.ports:3} ports"
    got = f"{made.tried:6} tried, {made.connected:6} connected, {made.answered:5} answered"
    if made.slower:
        low, middle, high = statistics.quantiles(made.slower, n=4)
        got += f", step {middle:.3f} ({low:.3f} - {high:.3f})"
    return f"{'BAD' if made.problems else 'ok '} {what} {got} {'; '.join(made.problems)}"


if __name__ == "__main__":
    sys.exit(main())
