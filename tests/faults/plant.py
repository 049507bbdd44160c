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


def is_ours(pid: int) -> bool:
    """Whether a process is hetctl's on a host: the program that travels, or the agent it becomes."""
    return b"stdin.readline" in words(pid) or b"launcher.agent.agent" in words(pid)


def root_of(host: netns.RigHost) -> Path:
    """The root folder as the host sees it: its HOME is a file system of its own there."""
    return Path(f"/proc/{next(p for p in host.pids() if b'sshd_config' in words(p))}/root")


def signal_rank(number: int) -> Callable[[Scene], bool]:
    def plant(scene: Scene) -> bool:
        ranks = scene.ranks()[:1]
        until = time.monotonic() + 5.0
        while number == RAISE and ranks and not catches(ranks[0], number) and time.monotonic() < until:
            time.sleep(0.01)  # its Python is only starting
        return any(scene.hit(pid, number) for pid in ranks)

    return plant


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return True  # it is gone: nothing to wait for


def kill_agent(scene: Scene) -> bool:
    """The agent, or the program that is about to become it; the guardian is the older process of the two."""
    return any(scene.hit(pid, signal.SIGKILL) for pid in sorted(filter(is_ours, scene.host.pids()))[-1:])


def signal_store(number: int) -> Callable[[Scene], bool]:
    """The run's store, on whichever host it is."""

    def plant(scene: Scene) -> bool:
        pids = [pid for host in scene.rig.hosts for pid in host.pids() if b"launcher.agent.store\0" in words(pid)]
        return any(scene.hit(pid, number) for pid in pids)

    return plant


def kill_launcher(scene: Scene) -> bool:
    return scene.launcher.process.poll() is None and scene.hit(scene.launcher.process.pid, signal.SIGKILL)


def drop_ssh(scene: Scene) -> bool:
    sessions = [pid for pid in scene.host.pids() if b"sshd: root@" in words(pid)]
    return sum(scene.hit(pid, signal.SIGKILL) for pid in sessions) > 0


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
    scene.at = time.monotonic()
    with fill.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        about = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize)
    with fill.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):  # what others gave back meanwhile
            pass
    return scene.launcher.process.poll() is None


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
    to hit while code is shipped. `unverified`: it takes `hetctl clean` to know that nothing is left.
    """

    plant: Callable[[Scene], bool]
    causes: tuple[str, ...] = ()
    survives: bool = False
    needs_ranks: bool = False
    crash: bool = False
    blames: bool = False
    loses_launcher: bool = False
    unverified: bool = False
    prepare: Callable[[Scene], None] | None = None


def of_store(number: int, *causes: str, crash: bool = True) -> Fault:
    return Fault(signal_store(number), causes, needs_ranks=True, crash=crash)


def of_rank(number: int, *causes: str, crash: bool = True) -> Fault:
    return Fault(signal_rank(number), causes, needs_ranks=True, crash=crash, blames=True)


FAULTS = {
    "worker KILL": of_rank(signal.SIGKILL, "SIGKILL"),
    "worker STOP": of_rank(signal.SIGSTOP, "SIGSTOP", "no answer", crash=False),
    "exception": of_rank(RAISE, "planted"),
    "segfault": of_rank(signal.SIGSEGV, "SIGSEGV"),
    "store KILL": of_store(signal.SIGKILL, "the run's store"),
    "store TERM": of_store(signal.SIGTERM, "the run's store"),
    "store SEGV": of_store(signal.SIGSEGV, "the run's store"),
    "store STOP": of_store(signal.SIGSTOP, "the run's store", "no answer", "timed out", "timeout", crash=False),
    "agent KILL": Fault(kill_agent, ("agent was killed", "program on the host was killed"), crash=True, blames=True),
    "launcher KILL": Fault(kill_launcher, loses_launcher=True, unverified=True),
    "SSH drop": Fault(drop_ssh, ("connection", "broke off", "ended early"), survives=True),
    "cut launcher-host": Fault(cut("v"), ("stopped answering", "no answer", "lost"), blames=True, unverified=True),
    "cut host-host": Fault(cut("r0v"), ("cannot reach", "no answer", "timed out", "Timeout")),
    "disk full": Fault(fill_disk, ("No space left", "os error 28"), survives=True),
    "port taken": Fault(take_port, survives=True),
    "second run": Fault(fail_another, survives=True, prepare=start_another),
}


def cannot_be(fault: str, stage: str) -> str:
    """Why a cell of the matrix does not exist, '' when it does."""
    return "no rank exists yet" if stage == "shipping" and FAULTS[fault].needs_ranks else ""
