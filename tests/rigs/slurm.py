"""A real Slurm over the namespaced hosts of a rig: its controller here, a slurmd in each host, partitions as asked."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rigs import netns

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc")
CONFIG = """\
ClusterName=hetctl
SlurmctldHost={here}({address})
SlurmctldPort={port}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
KillWait=30
MinJobAge=2
"""


def unavailable() -> str:
    """Why there is no Slurm here, '' where there is."""
    if why := netns.unavailable():
        return why
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    install = "apt-get install slurmctld slurmd slurm-client munge"
    return f"Slurm's daemons need {', '.join(missing)}: {install}" if missing else ""


@dataclass(frozen=True)
class Site:
    """A cluster under Slurm, as somebody sees it who is logged in here."""

    rig: netns.Rig
    environment: Mapping[str, str]

    def ask(self, *argv: str) -> str:
        done = subprocess.run(argv, env={**os.environ, **self.environment}, text=True, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until(self, true: Callable[[], bool], *, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.ask("squeue")
            time.sleep(0.2)


@contextlib.contextmanager
def slurm(rig: netns.Rig, partitions: Mapping[str, Sequence[int]], folder: Path) -> Iterator[Site]:
    """Slurm on the rig's hosts as long as the block lasts; the first partition is the default one."""
    folder.mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    ports = _free_ports(2)
    text = CONFIG.format(
        here=socket.gethostname(),
        address=rig.hosts[0].address.rpartition(".")[0] + ".254",
        port=ports[0],
        daemon=ports[1],
        folder=folder,
    )
    for host in rig.hosts:
        (folder / f"spool-{host.name}").mkdir()
        text += f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name} CPUs=8\n"
    for number, (name, members) in enumerate(partitions.items()):
        nodes = ",".join(rig.hosts[n].name for n in members)
        text += f"PartitionName={name} Nodes={nodes} Default={'NO' if number else 'YES'}\n"
    config = folder / "slurm.conf"
    config.write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {"SLURM_CONF": str(config)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*argv: str) -> None:
        with (folder / f"{argv[0]}-{len(daemons)}.out").open("wb") as out:
            env = {**os.environ, **environment}
            daemons.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True))

    try:
        start(*munge)
        start("slurmctld", "-D", "-f", str(config))
        for host in rig.hosts:
            # it wants a control group's file system, and the namespace has a /sys of its own
            begin = f"mount -t cgroup2 none /sys/fs/cgroup; exec slurmd -D -N {host.name} -f {config}"
            start("ip", "netns", "exec", host.namespace, "sh", "-c", begin)
        site = Site(rig, environment)
        site.until(lambda: _idle(site) == len(rig.hosts), seconds=60)
        yield site
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)
            daemon.kill()


def _idle(site: Site) -> int:
    shown = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        env={**os.environ, **site.environment},
        text=True,
        capture_output=True,
    )
    return len(set(shown.stdout.split()))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, here."""
    held = [socket.create_server(("", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found
