"""`--launcher slurm` outside an allocation: the same command as a batch script, shown, kept, and submitted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.files import write_atomically
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import create_run

SAVE_BEFORE_S = 120  # this long before the time limit the run saves and ends
SUBMIT_S = 60.0


def outside_allocation(way: str) -> bool:
    """Whether `--launcher slurm` means to submit: we are not in a job yet."""
    return way == "slurm" and "SLURM_JOB_ID" not in os.environ


def submit(
    words: Sequence[str], hosts: Sequence[str], run_dir: Path | None, *, label: str, sink: Sink
) -> dict[str, Any]:
    """Submit `hetctl WORDS` for these nodes. Raises ConfigError without sbatch, WorkFailed when it refuses."""
    folder = create_run(run_dir, label)
    script = batch_script(words, hosts, folder.path)
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
    sink.say(f"{done.stdout.strip()}; its words: {folder.path}/console.log")
    return {
        "status": "submitted",
        "job": int(number[0]) if number else None,
        "script": str(path),
        "run_dir": str(folder.path),
    }


def batch_script(words: Sequence[str], hosts: Sequence[str], folder: Path) -> str:
    """The script: one step of the batch job is the supervisor, which starts an agent on each node by srun."""
    cut = list(words).index("--") if "--" in words else len(words)
    own = [*words[:cut], *([] if "--run-dir" in words[:cut] else ["--run-dir", str(folder)])]
    command = shlex.join([sys.executable, "-m", "hetctl", *own, *words[cut:]])
    bad = [h for h in hosts if not re.fullmatch(r"[A-Za-z0-9._-]+", h)]
    if bad:
        raise ConfigError(f"'{bad[0]}' is not the name of a Slurm node")
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name=hetctl-{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.name)}\n"
        f"#SBATCH --nodes={len(hosts)} --ntasks-per-node=1\n"
        f"#SBATCH --nodelist={','.join(hosts)}\n"
        f"#SBATCH --output={shlex.quote(str(folder / 'console.log'))}\n"
        f"#SBATCH --signal=B:USR2@{SAVE_BEFORE_S}\n"
        f"cd {shlex.quote(str(Path.cwd()))} && exec {command}\n"
    )


def check_allocation(hosts: Sequence[str], nodelist: str) -> None:
    """Raise ConfigError naming hosts of the cluster that the allocation does not hold."""
    from hetctl.discovery.hostnames import expand

    held = {spot.host for spot in expand(nodelist)}
    strangers = [h for h in hosts if h not in held]
    if strangers:
        raise ConfigError(
            f"{', '.join(strangers[:8])} of the cluster is not in this allocation ({nodelist})",
            hint="discover the allocation's own nodes, or use --launcher ssh",
        )
