"""The faults: how each is planted in a running job, and what should come of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.rigs import netns
from tests.rigs.cluster import command, environment

STAGES = ("shipping", "rendezvous", "step", "checkpoint", "teardown")
RAISE = signal.SIGRTMIN + 4  # the hosts' Python raises a ValueError on it


@dataclass
class Scene:
    """A run to disturb: its hosts, the launcher's process, and where its files are."""

    rig: netns.Rig
    folder: Path
    run: Path
    process: subprocess.Popen[str]
    victim: int  # number of the host that suffers
    undo: contextlib.ExitStack

    @property
    def host(self) -> netns.RigHost:
        return self.rig.hosts[self.victim]

    def ranks(self) -> list[int]:
        """The rank processes on the victim."""
        return [pid for pid in self.host.pids() if b"RANK=" in environ(pid) and b"trainer" in words(pid)]


def environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def signal_rank(number: int) -> Callable[[Scene], bool]:
    def plant(scene: Scene) -> bool:
        for pid in scene.ranks()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                return True
        return False

    return plant


def kill_agent(scene: Scene) -> bool:
    agents = [pid for pid in scene.host.pids() if b"launcher.agent" in words(pid)]
    for pid in sorted(agents)[-1:]:  # the guardian is the older one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def kill_launcher(scene: Scene) -> bool:
    if scene.process.poll() is not None:
        return False
    scene.process.kill()
    return True


def drop_ssh(scene: Scene) -> bool:
    sessions = [pid for pid in scene.host.pids() if b"sshd: root@" in words(pid)]
    for pid in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(sessions)


def cut(prefix: str) -> Callable[[Scene], bool]:
    """Take the outer end of the victim's cable down: v is the way to the launcher, r0v the one between hosts."""

    def plant(scene: Scene) -> bool:
        cable = f"{scene.host.namespace[:-2]}{prefix}{scene.victim}"
        subprocess.run(["ip", "link", "set", cable, "down"], check=True)
        scene.undo.callback(lambda: subprocess.run(["ip", "link", "set", cable, "up"], check=True))
        return True

    return plant


def fill_disk(scene: Scene) -> bool:
    server = next(pid for pid in scene.host.pids() if b"sshd_config" in words(pid))
    home = f"/proc/{server}/root{scene.host.folder}/home/fill"
    subprocess.run(["dd", "if=/dev/zero", f"of={home}", "bs=1M"], capture_output=True)
    scene.undo.callback(lambda: Path(home).unlink(missing_ok=True))
    return True


def take_port(scene: Scene) -> bool:
    """The first ports of the declared range are taken on the store's host."""
    low = int(os.environ["HETCTL_PORTS"].partition("-")[0])
    holder = scene.rig.hosts[0].start(
        netns.PYTHON,
        "-c",
        f"import socket,time\nfor p in range({low},{low + 3}):\n"
        f" try:\n  globals()['s%d'%p]=socket.create_server(('{scene.rig.hosts[0].rails[0]}',p))\n"
        " except OSError: pass\ntime.sleep(600)",
    )
    scene.undo.callback(holder.wait)
    scene.undo.callback(holder.kill)
    return True


def run_another(scene: Scene) -> bool:
    """A second run on the same hosts, which fails: nobody else may notice."""
    program = scene.folder / "other" / "fails.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text("import time\ntime.sleep(1)\nraise SystemExit(3)\n")
    argv = command("run", "--cluster", "cluster.yaml", "--run-dir", f"{scene.run.name}-other", "--", "python")
    done = subprocess.run(
        [*argv, str(program)], cwd=scene.folder, env=environment(scene.rig), capture_output=True, timeout=120
    )
    return done.returncode == 1


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `causes`: one of these words must be in the reason that is given; `survives`: the run goes on.

    `before` faults are planted before the run starts; those without ranks to hit do not apply to shipping.
    """

    plant: Callable[[Scene], bool]
    causes: tuple[str, ...] = ()
    survives: bool = False
    needs_ranks: bool = False
    loses_launcher: bool = False
    before: bool = False


FAULTS = {
    "worker KILL": Fault(signal_rank(signal.SIGKILL), ("SIGKILL",), needs_ranks=True),
    "worker STOP": Fault(signal_rank(signal.SIGSTOP), ("SIGSTOP", "no answer"), needs_ranks=True),
    "exception": Fault(signal_rank(RAISE), ("planted",), needs_ranks=True),
    "segfault": Fault(signal_rank(signal.SIGSEGV), ("SIGSEGV",), needs_ranks=True),
    "agent KILL": Fault(kill_agent, ("agent",)),
    "launcher KILL": Fault(kill_launcher, loses_launcher=True),
    "SSH drop": Fault(drop_ssh, ("connection", "broke off", "ended early"), survives=True),
    "cut launcher-host": Fault(cut("v"), ("stopped answering", "no answer", "timeout")),
    "cut host-host": Fault(cut("r0v"), ("cannot reach", "no answer", "timed out", "Timeout"), needs_ranks=True),
    "disk full": Fault(fill_disk, ("No space left", "os error 28"), survives=True),
    "port taken": Fault(take_port, survives=True),
    "second run": Fault(run_another, survives=True),
}
