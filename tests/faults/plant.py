"""The faults: how each is planted in a running job, and what should come of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs import netns
from tests.rigs.cluster import command, environment

STAGES = ("shipping", "rendezvous", "step", "checkpoint", "teardown")
RAISE = signal.SIGRTMIN + 4  # the hosts' Python raises a ValueError on it
PORTS = range(29500, 29541)  # where the runs' stores may listen


class Launcher:
    """A launcher's process, and when each line of its stderr was read, by the clock that faults are planted by."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._drain)]
        for reader in self._readers:
            reader.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.read()

    def end(self, seconds: float) -> bool:
        """Whether it ended by itself within that time; it is over in either case."""
        try:
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            for reader in self._readers:
                reader.join(5.0)

    @property
    def said(self) -> str:
        return "\n".join(line for _, line in self.lines)


@dataclass
class Scene:
    """A run to disturb: its hosts, its launcher, and where its files are."""

    rig: netns.Rig
    folder: Path
    run: Path
    victim: int  # number of the host that suffers
    undo: contextlib.ExitStack
    launcher: Launcher = field(init=False)
    other: subprocess.Popen[bytes] | None = None  # a second run on the same hosts
    at: float = field(default_factory=time.monotonic)  # when the fault was planted

    @property
    def host(self) -> netns.RigHost:
        return self.rig.hosts[self.victim]

    def ranks(self) -> list[int]:
        """The rank processes on the victim."""
        return [pid for pid in self.host.pids() if b"RANK=" in environ(pid) and b"trainer" in words(pid)]

    def hit(self, pid: int, number: int) -> bool:
        """Signal a process; False when it was over before."""
        self.at = time.monotonic()
        return self.signal(pid, number)

    @staticmethod
    def signal(pid: int, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False


def environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# what a command line is of, by the first of these that it has
ROLES = {
    "torch.distributed.run": "torchrun",
    "agent.store": "store",
    "hetctl.trainer": "rank",
    "launcher.agent": "agent",
    "stdin.readline": "agent",
    "door_client": "door",
    "kubectl": "kubectl",
    "srun": "srun",
    "-m hetctl": "launcher",
}


def role_of(pid: int) -> str:
    """What a process is of a run; '' of one that is none of its."""
    said = words(pid).replace(b"\0", b" ").decode(errors="replace")
    return next((role for mark, role in ROLES.items() if mark in said), "")


def is_ours(pid: int) -> bool:
    """Whether a process is hetctl's on a host: the program that travels, or the agent it becomes."""
    return b"stdin.readline" in words(pid) or b"launcher.agent.agent" in words(pid)


def root_of(host: netns.RigHost) -> Path:
    """The root folder as the host sees it: its HOME is a file system of its own there."""
    return Path(f"/proc/{next(p for p in host.pids() if b'sshd_config' in words(p))}/root")


def ranks(scene: Scene) -> list[int]:
    return scene.ranks()[:1]


def raising_ranks(scene: Scene) -> list[int]:
    """Those that have a handler already, or had five seconds to come to it."""
    found, until = ranks(scene), time.monotonic() + 5.0
    while found and not catches(found[0], RAISE) and time.monotonic() < until:
        time.sleep(0.01)  # its Python is only starting
    return found


def agent(scene: Scene) -> list[int]:
    """The agent, or the program that is about to become it; the guardian is the older process of the two."""
    return sorted(filter(is_ours, scene.host.pids()))[-1:]


def guardian(scene: Scene) -> list[int]:
    return sorted(filter(is_ours, scene.host.pids()))[:1]


def store(scene: Scene) -> list[int]:
    """The run's store, on whichever host it is."""
    return [pid for host in scene.rig.hosts for pid in host.pids() if b"launcher.agent.store\0" in words(pid)]


def launcher(scene: Scene) -> list[int]:
    process = scene.launcher.process
    return [process.pid] if process.poll() is None else []


def sessions(scene: Scene) -> list[int]:
    """What a command on the host runs under: it execs itself over the login's shell."""
    return sessions_on(scene.host)


def sessions_on(host: netns.RigHost) -> list[int]:
    return [pid for pid in host.pids() if b"sshd: root@" in words(pid)]


def signalled(who: Callable[[Scene], list[int]], number: int, *, again_s: float = 0.0) -> Callable[[Scene], bool]:
    """Signal these; those that are stopped go on after `again_s`, unless that is zero."""

    def plant(scene: Scene) -> bool:
        hit = [pid for pid in who(scene) if scene.hit(pid, number)]
        if again_s:
            timer = threading.Timer(again_s, lambda: [scene.signal(pid, signal.SIGCONT) for pid in hit])
            timer.start()
            scene.undo.callback(timer.join)
        return bool(hit)

    return plant


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return True  # it is gone: nothing to wait for


def cut(prefix: str) -> Callable[[Scene], bool]:
    """Take the outer end of the victim's cable down: v is the way to the launcher, r0v the one between hosts."""

    def plant(scene: Scene) -> bool:
        cable = f"{scene.host.namespace[:-2]}{prefix}{scene.victim}"
        scene.at = time.monotonic()
        subprocess.run(["ip", "link", "set", cable, "down"], check=True)
        scene.undo.callback(lambda: subprocess.run(["ip", "link", "set", cable, "up"], check=True))
        return scene.launcher.process.poll() is None

    return plant


def fill_disk(scene: Scene) -> bool:
    fill = Path(f"{root_of(scene.host)}{scene.host.folder}/home/fill")
    scene.undo.callback(lambda: fill.unlink(missing_ok=True))
    scene.at, running = time.monotonic(), scene.launcher.process.poll() is None  # it may end of it before all is full
    with fill.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        about = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize)
    with fill.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):  # what others gave back meanwhile
            pass
    return running


def take_port(scene: Scene) -> bool:
    """The first ports of the declared range are taken on the store's host."""
    low, address = PORTS[0], scene.rig.hosts[0].rails[0]
    program = (
        f"import socket,time\nfor p in range({low},{low + 3}):\n try:\n"
        f"  globals()['s%d'%p]=socket.create_server(('{address}',p))\n except OSError: pass\ntime.sleep(600)"
    )
    scene.at = time.monotonic()
    holder = scene.rig.hosts[0].start(netns.PYTHON, "-S", "-c", program)
    scene.undo.callback(holder.wait)
    scene.undo.callback(holder.kill)
    return scene.launcher.process.poll() is None


OTHER = """
import pathlib, time
pathlib.Path.home().joinpath("other-up").touch()
while not pathlib.Path.home().joinpath("other-fail").exists():
    time.sleep(0.02)
raise SystemExit(3)
"""


def start_another(scene: Scene) -> None:
    """A second run on the same hosts, up before the first one begins."""
    for host in scene.rig.hosts:
        for name in ("other-up", "other-fail"):
            Path(f"{root_of(host)}{host.folder}/home/{name}").unlink(missing_ok=True)
    program = scene.folder / "other" / "fails.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text(OTHER)
    name = f"{scene.run.name}-other-{time.monotonic_ns()}"
    argv = command("run", "--cluster", "cluster.yaml", "--run-dir", name, "--", "python", str(program))
    env, quiet = environment(scene.rig, HETCTL_PORTS=f"{PORTS[0]}-{PORTS[-1]}"), subprocess.DEVNULL
    scene.other = subprocess.Popen(argv, cwd=scene.folder, env=env, stdout=quiet, stderr=quiet)
    scene.undo.callback(scene.other.kill)
    until = time.monotonic() + 60
    while not all(Path(f"{root_of(h)}{h.folder}/home/other-up").exists() for h in scene.rig.hosts):
        assert time.monotonic() < until, "the second run does not come up"
        time.sleep(0.05)


def fail_another(scene: Scene) -> bool:
    """The second run fails and is cleaned up: nobody else may notice."""
    assert scene.other is not None
    scene.at = time.monotonic()
    for host in scene.rig.hosts:
        Path(f"{root_of(host)}{host.folder}/home/other-fail").touch()
    return scene.other.wait(60) == 1


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `causes`: one of these words must be in the reason that is given; `survives`: the run goes on.

    `crash`: it must be known within two seconds. `blames`: the victim must be named. Faults that need ranks have none
    to hit while code is shipped. `unverified`: it takes `hetctl clean` to know that nothing is left. `exits`: the codes
    of a run that the fault ends. `sweeps_later`: in these stages nobody is left to remove half-made files; the next
    agent there does.
    """

    plant: Callable[[Scene], bool]
    causes: tuple[str, ...] = ()
    survives: bool = False
    needs_ranks: bool = False
    crash: bool = False
    blames: bool = False
    loses_launcher: bool = False
    unverified: bool = False
    exits: tuple[int, ...] = (1, 4)
    sweeps_later: tuple[str, ...] = ()
    prepare: Callable[[Scene], None] | None = None


RANK: dict[str, Any] = {"needs_ranks": True, "blames": True}
STORE: dict[str, Any] = {"causes": ("the run's store",), "needs_ranks": True}
AGENT: dict[str, Any] = {"causes": ("agent was killed", "program on the host was killed"), "blames": True}
AGENT["sweeps_later"] = ("shipping",)  # what unpacks code has no guardian yet
UNWATCHED: dict[str, Any] = {"blames": True, "unverified": True}  # nobody on the host says that all have ended
LATE = ("no answer", "timed out", "timeout")
PAUSE_S = 4.0  # of what is stopped and goes on: longer than anything is waited for that has only to answer

FAULTS = {
    "worker KILL": Fault(signalled(ranks, signal.SIGKILL), ("SIGKILL",), crash=True, **RANK),
    "worker STOP": Fault(signalled(ranks, signal.SIGSTOP), ("SIGSTOP", "no answer"), **RANK),
    "worker STOP/CONT": Fault(signalled(ranks, signal.SIGSTOP, again_s=PAUSE_S), survives=True, needs_ranks=True),
    "worker TERM": Fault(signalled(ranks, signal.SIGTERM), exits=(143, 1), needs_ranks=True),
    "exception": Fault(signalled(raising_ranks, RAISE), ("planted",), crash=True, **RANK),
    "segfault": Fault(signalled(ranks, signal.SIGSEGV), ("SIGSEGV",), crash=True, **RANK),
    "store KILL": Fault(signalled(store, signal.SIGKILL), crash=True, **STORE),
    "store TERM": Fault(signalled(store, signal.SIGTERM), crash=True, **STORE),
    "store SEGV": Fault(signalled(store, signal.SIGSEGV), crash=True, **STORE),
    "store STOP": Fault(signalled(store, signal.SIGSTOP), ("the run's store", *LATE), needs_ranks=True),
    "store STOP/CONT": Fault(signalled(store, signal.SIGSTOP, again_s=PAUSE_S), survives=True, needs_ranks=True),
    "agent KILL": Fault(signalled(agent, signal.SIGKILL), crash=True, **AGENT),
    "agent TERM": Fault(signalled(agent, signal.SIGTERM), crash=True, **AGENT),
    "agent SEGV": Fault(signalled(agent, signal.SIGSEGV), crash=True, **AGENT),
    "agent STOP": Fault(signalled(agent, signal.SIGSTOP), **UNWATCHED),
    "agent STOP/CONT": Fault(signalled(agent, signal.SIGSTOP, again_s=PAUSE_S), survives=True),
    "guardian KILL": Fault(signalled(guardian, signal.SIGKILL), sweeps_later=STAGES, **UNWATCHED),
    "guardian SEGV": Fault(signalled(guardian, signal.SIGSEGV), sweeps_later=STAGES, **UNWATCHED),
    "guardian STOP/CONT": Fault(signalled(guardian, signal.SIGSTOP, again_s=PAUSE_S), survives=True),
    "launcher KILL": Fault(signalled(launcher, signal.SIGKILL), loses_launcher=True, unverified=True),
    "launcher SEGV": Fault(signalled(launcher, signal.SIGSEGV), loses_launcher=True, unverified=True),
    "launcher TERM": Fault(signalled(launcher, signal.SIGTERM), exits=(143,)),
    "launcher STOP/CONT": Fault(signalled(launcher, signal.SIGSTOP, again_s=PAUSE_S), survives=True),
    "SSH drop": Fault(signalled(sessions, signal.SIGKILL), ("connection", "broke off", "ended early"), survives=True),
    "cut launcher-host": Fault(cut("v"), ("stopped answering", "no answer", "lost"), blames=True, unverified=True),
    "cut host-host": Fault(cut("r0v"), ("cannot reach", "no answer", "timed out", "Timeout")),
    "disk full": Fault(fill_disk, ("No space left", "os error 28"), survives=True),
    "port taken": Fault(take_port, survives=True),
    "second run": Fault(fail_another, survives=True, prepare=start_another),
}


def cannot_be(fault: str, stage: str) -> str:
    """Why a cell of the matrix does not exist, '' when it does."""
    if (fault, stage) == ("agent STOP", "shipping"):
        return "what unpacks code has no guardian yet: it is waited for 120 s, and stays stopped"
    return "no rank exists yet" if stage == "shipping" and FAULTS[fault].needs_ranks else ""
