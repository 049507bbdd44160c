"""A run handed on to a process that outlives this one: `--detach` in the background of this machine, Slurm as a job.

What was decided travels as one JSON file, not as a command line: `python -m hetctl.runs.handover FOLDER` runs it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError, HetctlError, WorkFailed
from hetctl.comm.contract.files import write_atomically
from hetctl.comm.contract.values import decode, encode
from hetctl.console import Sink, guarded
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import active
from hetctl.runs.prepare import Prepared
from hetctl.runs.program import ProgramRun, run_program
from hetctl.runs.train import GoingOn, train
from hetctl.runs.verdict import raise_unless_done, with_way_on

START_S = 120.0
CONSOLE = "console.log"
SAVE_BEFORE_S = 120  # this long before the time limit of a Slurm job the run saves and ends
SUBMIT_S = 60.0


@dataclass(frozen=True)
class Handover:
    """A training run or a program's, with everything decided."""

    training: Prepared | None = None
    how: GoingOn = field(default_factory=GoingOn)
    program: ProgramRun | None = None

    @property
    def hosts(self) -> list[str]:
        which = self.training or self.program
        return [host.name for host in which.launch.hosts] if which else []


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
    _keep(run, folder)
    console = folder.path / CONSOLE
    with console.open("wb") as out:
        child = subprocess.Popen(
            _argv(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + START_S
    while not any(r.pid == child.pid and r.supervised for r in active()):
        if child.poll() is not None or time.monotonic() > until:
            if child.returncode == 0:
                break
            said = console.read_text(errors="replace").strip().splitlines()[-3:]
            raise WorkFailed(f"the run did not start: {' / '.join(said)}", hint=f"see {console}")
        time.sleep(0.1)
    sink.say(f"{folder.name} runs in the background: hetctl logs -f {folder.path}, hetctl stop {folder.name}")
    return {"run": folder.name, "pid": child.pid, "run_dir": str(folder.path), "console": str(console)}


def outside_allocation(way: str) -> bool:
    """Whether `--launcher slurm` means to submit: we are not in a job yet."""
    return way == "slurm" and "SLURM_JOB_ID" not in os.environ


def submit(run: Handover, folder: RunFolder, sink: Sink) -> dict[str, Any]:
    """Submit it for its nodes. Raises ConfigError without sbatch, WorkFailed when it refuses."""
    _keep(run, folder)
    script = batch_script(folder, run.hosts)
    path = folder.launch / "sbatch.sh"
    write_atomically(path, script)
    sink.say(script)
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=SUBMIT_S)
    except FileNotFoundError:
        raise ConfigError("there is no sbatch here", hint=f"submit {path} where there is") from None
    except subprocess.TimeoutExpired:
        raise WorkFailed("sbatch did not answer", hint=f"submit {path} by hand") from None
    if done.returncode:
        raise WorkFailed(f"sbatch refused: {done.stderr.strip()[:300]}", hint=f"the script is {path}")
    number = re.search(r"\d+", done.stdout)
    sink.say(f"{done.stdout.strip()}; its words: {folder.path}/{CONSOLE}")
    return {
        "status": "submitted",
        "job": int(number[0]) if number else None,
        "script": str(path),
        "run_dir": str(folder.path),
    }


def batch_script(folder: RunFolder, hosts: Sequence[str]) -> str:
    """The script: one step of the batch job is the supervisor, which starts an agent on each node by srun."""
    bad = [h for h in hosts if not re.fullmatch(r"[A-Za-z0-9._-]+", h)]
    if bad:
        raise ConfigError(f"'{bad[0]}' is not the name of a Slurm node")
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name=hetctl-{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.name)}\n"
        f"#SBATCH --nodes={len(hosts)} --ntasks-per-node=1\n"
        f"#SBATCH --nodelist={','.join(hosts)}\n"
        f"#SBATCH --output={shlex.quote(str(folder.path / CONSOLE))}\n"
        f"#SBATCH --signal=B:USR2@{SAVE_BEFORE_S}\n"
        f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(_argv(folder))}\n"
    )


def _keep(run: Handover, folder: RunFolder) -> None:
    write_atomically(_file(folder), json.dumps(encode(run)))


def _file(folder: RunFolder) -> Path:
    return folder.launch / "handover.json"


def _argv(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "hetctl.runs.handover", str(folder.path)]


def run_here(folder: RunFolder) -> None:
    """Run what was handed over, in its own folder, to its end. Raises HetctlError."""
    sink, file = Sink(), _file(folder)
    run = decode(Handover, json.loads(file.read_text(encoding="utf-8")), where=file.name)
    if run.training is not None:
        raise_unless_done(train_here(run.training, run.how, folder, sink))
    elif run.program is not None:
        raise_unless_done(run_program(run.program, folder, sink))


if __name__ == "__main__":
    guarded(lambda: run_here(RunFolder(Path(sys.argv[1]))))
