"""The runs that were started from this machine and are not known to have ended cleanly: one small file each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError, HetctlError, nearest
from hetctl.comm.contract.files import read_json, write_json
from hetctl.comm.contract.values import decode, encode
from hetctl.launcher.agent.bootstrap import state_home
from hetctl.launcher.engines.slurm_jobs import current_job, job_state
from hetctl.launcher.run_folder.folder import RunFolder


@dataclass(frozen=True)
class ActiveRun:
    """One run: who supervises it, where its files are, and how its hosts are entered."""

    run: str  # its identity on hosts
    folder: str
    pid: int
    born: str  # the supervisor's start time and boot, so that another process with its number is told apart
    started: float  # seconds since the epoch
    hosts: Mapping[str, Access]
    way: str = "ssh"
    job: int | None = None  # of Slurm, that waits for its nodes or has the supervisor in it

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def supervised(self) -> bool:
        """Whether its supervisor still runs, or will."""
        return not self.state.startswith(LOST)

    @property
    def state(self) -> str:
        """`running`, what Slurm says of its job, or LOST and why."""
        if self.job is not None and not (self.pid and birth(self.pid) == self.born):
            try:
                told = job_state(self.job)
            except HetctlError as error:
                return f"unknown: {error.message}"
            return _lost(f"Slurm says {told.words}") if told.over else told.words
        return "running" if birth(self.pid) == self.born else _lost("its supervisor is gone")


LOST = "lost: "


def _lost(why: str) -> str:
    return f"{LOST}{why} (hetctl clean)"


def home() -> Path:
    return Path(state_home()) / "hetctl" / "active"


def enlist(run: str, folder: Path, hosts: Mapping[str, Access], *, way: str, job: int | None = None) -> None:
    """Note that this process supervises a run, or that a `job` will. Values of environments stay out of the file.

    Raises ConfigError when another process supervises it already.
    """
    supervisor = current_job() if job is None else job
    refuse_supervised(run, folder, supervisor)
    bare = {name: encode(access) | {"env": {}} for name, access in hosts.items()}
    pid = os.getpid() if job is None else 0
    record = ActiveRun(run, str(folder), pid, birth(pid) if pid else "", time.time(), {}, way, supervisor)
    write_json(home() / f"{run}.json", encode(record) | {"hosts": bare})


@dataclass
class OnFile:
    """A run's place on file while this process supervises it."""

    folder: RunFolder
    listed: bool = False
    left: bool = False  # whether anything of it may be left on its hosts

    def enlist(self, hosts: Mapping[str, Access], *, way: str) -> None:
        """Raises ConfigError when another process supervises it."""
        enlist(self.folder.identity, self.folder.path, hosts, way=way)
        self.listed = True


@contextmanager
def on_file(folder: RunFolder) -> Iterator[OnFile]:
    """From where it is enlisted to the end of this block, in which how it ended is written for who follows it, a run is
    on file; from then on where anything of it may be left."""
    place = OnFile(folder)
    try:
        yield place
    finally:
        if place.listed and not place.left:
            delist(folder.identity)


def refuse_supervised(run: str, folder: Path, job: int | None = None) -> None:
    """Raise ConfigError when another process than this one, or another job than that, supervises a run."""
    before = home() / f"{run}.json"
    other = _record(before) if before.is_file() else None
    if other and other.pid != os.getpid() and (job is None or other.job != job) and other.supervised:
        why = f"{folder} is of a run that process {other.pid} supervises"
        why = why if other.job is None else f"{folder} is of a run that Slurm has as job {other.job}"
        raise ConfigError(why, hint=f"hetctl stop {other.name}")


def delist(run: str) -> None:
    """It ended, and nothing is left."""
    (home() / f"{run}.json").unlink(missing_ok=True)


def active() -> list[ActiveRun]:
    """All runs on file, newest first; what cannot be read is no run."""
    found = [run for path in home().glob("*.json") if (run := _record(path)) is not None]
    return sorted(found, key=lambda r: -r.started)


def find(word: str, runs: Sequence[ActiveRun]) -> ActiveRun:
    """The run of that name, identity, or folder. Raises ConfigError naming the nearest."""
    for run in runs:
        if word in (run.run, run.name, run.folder) or Path(word).resolve() == Path(run.folder):
            return run
    hint = nearest(word, [r.name for r in runs]) if runs else "`hetctl ps` shows none"
    raise ConfigError(f"no run '{word}' is on file here", hint=hint)


def birth(pid: int) -> str:
    """When a process was started, in ticks since which boot; '' when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = stat.rpartition(") ")[2].split()
        return "" if fields[0] == "Z" else f"{fields[19]}@{boot}"
    except (OSError, IndexError):
        return ""


def _record(path: Path) -> ActiveRun | None:
    try:
        return decode(ActiveRun, read_json(path), where=path.name)
    except (OSError, ValueError, ConfigError):
        return None
