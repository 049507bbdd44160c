"""A run handed on to a process that outlives this one: `--detach` in the background of this machine, Slurm as a job.

What was decided travels as one JSON file, not as a command line: `python -m hetctl.runs.handover FOLDER` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Access, Host
from hetctl.comm.contract.errors import HetctlError, WorkFailed
from hetctl.comm.contract.files import write_atomically
from hetctl.comm.contract.values import decode, encode
from hetctl.console import Sink, guarded
from hetctl.launcher.engines.slurm_jobs import (
    batch_script,
    components_of,
    current_job,
    node_facts,
    requeue,
    submit_script,
)
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import active, enlist, refuse_supervised
from hetctl.runs.prepare import Prepared
from hetctl.runs.program import ProgramRun, run_program
from hetctl.runs.resume import RESUME, resume_command
from hetctl.runs.train import GoingOn, train
from hetctl.runs.verdict import raise_unless_done, with_way_on
from hetctl.trainer.checkpoint import listing

START_S = 120.0
CONSOLE = "console.log"


@dataclass(frozen=True)
class Handover:
    """A training run or a program's, with everything decided."""

    training: Prepared | None = None
    how: GoingOn = field(default_factory=GoingOn)
    program: ProgramRun | None = None

    @property
    def hosts(self) -> list[Host]:
        which = self.training or self.program
        return which.launch.hosts if which else []


def train_here(prepared: Prepared, how: GoingOn, folder: RunFolder, sink: Sink) -> dict[str, Any]:
    """Train to the end; its summary. Errors that come before one say how the run is begun again."""
    try:
        return train(prepared, folder, how, sink).document()
    except HetctlError as error:
        raise with_way_on(error, folder) from None


def run_in_background(run: Handover, folder: RunFolder, sink: Sink) -> dict[str, Any]:
    """Start it in a session of its own, its words in the run folder, and return once its hosts are being entered.

    Raises WorkFailed with its last words when it ends before that.
    """
    refuse_supervised(folder.identity, folder.path)
    _keep(run, folder)
    console = folder.path / CONSOLE
    with open(console, "ab", opener=partial(os.open, mode=0o600)) as out:  # it may hold what ranks print
        before = out.tell()
        child = subprocess.Popen(
            _argv(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + START_S
    while not any(r.pid == child.pid and r.supervised for r in active()):
        if child.poll() is not None or time.monotonic() > until:
            if child.returncode == 0:
                break
            said = console.read_bytes()[before:].decode(errors="replace").strip().splitlines()[-3:]
            raise WorkFailed(f"the run did not start: {' / '.join(said)}", hint=f"see {console}")
        time.sleep(0.1)
    sink.say(f"{folder.name} runs in the background: hetctl logs -f {folder.path}, hetctl stop {folder.name}")
    return {"run": folder.name, "pid": child.pid, "run_dir": str(folder.path), "console": str(console)}


def outside_allocation(way: str) -> bool:
    """Whether `--launcher slurm` means to submit: we are not in a job yet."""
    return way == "slurm" and "SLURM_JOB_ID" not in os.environ


def submit(run: Handover, folder: RunFolder, sink: Sink) -> dict[str, Any]:
    """Submit it for its nodes. Raises ConfigError without sbatch, WorkFailed when it refuses."""
    refuse_supervised(folder.identity, folder.path)
    _keep(run, folder)
    facts = node_facts([host.name for host in run.hosts])
    if not facts:
        sink.warn("sinfo does not answer here: the job names no partition and no GPUs")
    components = components_of(run.hosts, facts)
    script = batch_script(folder.name, components, output=folder.path / CONSOLE, cwd=Path.cwd(), argv=_argv(folder))
    path = folder.launch / "sbatch.sh"
    write_atomically(path, script)
    sink.say(script)
    job, said = submit_script(path)
    if job is not None:
        enlist(folder.identity, folder.path, {h.name: h.access or Access() for h in run.hosts}, way="slurm", job=job)
    sink.say(f"{said}; its words: {folder.path}/{CONSOLE}")
    return {"status": "submitted", "job": job, "script": str(path), "run_dir": str(folder.path)}


def _keep(run: Handover, folder: RunFolder) -> None:
    write_atomically(_file(folder), json.dumps(encode(run)), private=True)  # how hosts are entered


def _file(folder: RunFolder) -> Path:
    return folder.launch / "handover.json"


def _argv(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "hetctl.runs.handover", str(folder.path)]


def run_here(folder: RunFolder) -> None:
    """Run what was handed over, in its own folder, to its end. Raises HetctlError."""
    sink, file = Sink(), _file(folder)
    run = decode(Handover, json.loads(file.read_text(encoding="utf-8")), where=file.name)
    if run.training is not None:
        before = folder.progress()["steps"]
        summary = train_here(run.training, _again(run.how, folder), folder, sink)
        raise_unless_done(summary)
        if summary["status"] == "saved" and (job := current_job()) is not None:
            _queue_again(job, folder, sink, gained=folder.progress()["steps"] - before)
    elif run.program is not None:
        raise_unless_done(run_program(run.program, folder, sink))


def _again(how: GoingOn, folder: RunFolder) -> GoingOn:
    """A job that was queued again goes on from what it has saved itself, however it was begun."""
    again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return replace(how, resume="auto") if again and listing.newest(folder.checkpoints) else how


def _queue_again(job: int, folder: RunFolder, sink: Sink, *, gained: int) -> None:
    """A run that saved before its job's time limit, or before it was preempted, goes on in the same job, later."""
    if not gained:
        sink.warn(f"job {job} is not queued again: it made no step in the time that it had")
        return
    try:
        sink.say(f"queueing job {job} again: {folder.name} goes on from what it saved")
        requeue(job)
    except HetctlError as error:
        sink.warn(f"job {job} could not be queued again: {error.message}; {RESUME} {resume_command(folder)}")


if __name__ == "__main__":
    guarded(lambda: run_here(RunFolder(Path(sys.argv[1]))))
