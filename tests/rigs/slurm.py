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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""
KEEPER = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
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

    def until(self, true: Callable[[], bool], *, seconds: float = 400.0) -> None:
        _until(true, seconds=seconds, about=lambda: self.ask("squeue"))


def without_accounting() -> str:
    """Why a site here has none, '' where it has."""
    missing = [tool for tool in ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct") if not shutil.which(tool)]
    return f"accounting needs {', '.join(missing)}: apt-get install slurmdbd mariadb-server" if missing else ""


@contextlib.contextmanager
def slurm(
    rig: netns.Rig, partitions: Mapping[str, Sequence[int]], folder: Path, *, urgent: Sequence[int] = ()
) -> Iterator[Site]:
    """Slurm on the rig's hosts as long as the block lasts, with accounting where its daemons are here.

    The first partition is the default one. Jobs of the partition `urgent` have those of others queued again.
    """
    folder.mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    ports, accounted = _free_ports(4), not without_accounting()
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
        text += f"PartitionName={name} Nodes={nodes} Default={'NO' if number else 'YES'} PriorityTier=1\n"
    if urgent:
        nodes = ",".join(rig.hosts[n].name for n in urgent)
        text += f"PartitionName=urgent Nodes={nodes} Default=NO PriorityTier=9\n"
    if accounted:
        text += ACCOUNTING.format(port=ports[2], folder=folder)
        keeper = folder / "slurmdbd.conf"
        keeper.write_text(KEEPER.format(port=ports[2], database=ports[3], folder=folder))
        keeper.chmod(0o600)
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
        if accounted:
            _make_database(folder)
            place = [f"--datadir={folder}/database", f"--socket={folder}/mariadb.socket"]
            start("mariadbd", "--no-defaults", "--user=root", *place, "--bind-address=127.0.0.1", f"--port={ports[3]}")
            start("slurmdbd", "-D")
            _until(lambda: _says(environment, "sacctmgr", "show", "cluster"), seconds=60)
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


def _make_database(folder: Path) -> None:
    """An empty one whose root is whoever comes from this machine."""
    words = ["--no-defaults", f"--datadir={folder}/database", "--user=root", "--auth-root-authentication-method=normal"]
    made = subprocess.run(["mariadb-install-db", *words, "--skip-test-db"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def _until(true: Callable[[], bool], *, seconds: float, about: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, about()
        time.sleep(0.2)


def _says(environment: Mapping[str, str], *argv: str) -> bool:
    return subprocess.run(argv, env={**os.environ, **environment}, capture_output=True).returncode == 0


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
