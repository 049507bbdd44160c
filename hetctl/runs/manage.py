"""`ps`, `stop`, `clean`: what runs were started from here, and ending them and what they left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract.cluster import Host
from hetctl.comm.contract.errors import ConfigError, HetctlError, Unreachable, WorkFailed, nearest
from hetctl.comm.contract.units import listed, show_seconds
from hetctl.console import Sink
from hetctl.launcher.engines.entrance import RELEASES, STILL_OPEN, Entrance
from hetctl.launcher.engines.slurm_jobs import stop_job
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.run_folder.folder import RunFolder, runs_here
from hetctl.launcher.run_folder.registry import ActiveRun, active, delist, find
from hetctl.launcher.supervisor.agents import ask
from hetctl.launcher.supervisor.launch import target_of

CLEAN_S = 30.0


def list_runs(sink: Sink) -> list[dict[str, Any]]:
    """All runs on file, shown with how far they are; the document for scripts."""
    table = Table("run", "state", "step", "hosts", "for", "folder")
    rows = []
    for run in active():
        state = run.state
        age, steps = time.time() - run.started, _progress(RunFolder(Path(run.folder)))
        hosts = listed(list(run.hosts), 8)
        row = (run.name, state, "-" if steps is None else str(steps), hosts, show_seconds(age), run.folder)
        table.add_row(*map(escape, row))
        about: dict[str, Any] = {"run": run.name, "state": state.partition(":")[0], "hosts": list(run.hosts)}
        about |= {} if run.job is None else {"job": run.job}
        rows.append({**about, "pid": run.pid, "folder": run.folder, "seconds": age, "step": steps})
    sink.say(table if rows else "no run was started from here that did not end cleanly")
    return rows


def stop_run(word: str | None, *, now: bool, timeout_s: float, sink: Sink) -> dict[str, Any]:
    """Ask a run's supervisor to stop, and wait for it. Without a word it is the only one, or the one a person names.

    Raises WorkFailed when it does not end in time.
    """
    run = find(word, active()) if word else _meant(sink)
    if not run.supervised:
        raise ConfigError(f"the supervisor of {run.name} is gone", hint=f"hetctl clean {run.name}")
    sink.say(f"stopping {run.name} ({run.folder})")
    if not now:
        sink.say(f"{run.name} finishes its step and saves (--now ends it at once)")
    if run.job is not None:
        stop_job(run.job, now=now or run.state.startswith("queued"))
    else:
        for _ in range(2 if now else 1):
            os.kill(run.pid, signal.SIGTERM)
            time.sleep(0.2)
    until = time.monotonic() + timeout_s
    while run.supervised:
        if time.monotonic() > until:
            raise WorkFailed(f"{run.name} is still ending", hint=f"hetctl stop --now {run.name} ends it at once")
        time.sleep(0.1 if run.job is None else 1.0)
    if run.job is not None:
        delist(run.run)  # what was cancelled before it began never took itself off; Slurm has ended the rest
    elif any(other.run == run.run for other in active()):
        raise WorkFailed(
            f"{run.name} is over, and nothing says that its hosts are clear", hint=f"hetctl clean {run.name}"
        )
    sink.say(f"{run.name} has ended")
    return {"run": run.name, "ended": True}


def clean_runs(word: str | None, *, sink: Sink) -> dict[str, Any]:
    """End and verify, on every host, what lost runs left behind. Raises Unreachable for hosts that do not say."""
    runs = [find(word, active())] if word else [r for r in active() if not r.supervised]
    if word and runs[0].supervised:
        raise ConfigError(f"{runs[0].name} is running", hint=f"hetctl stop {runs[0].name}")
    told: dict[str, Any] = {}
    silent: list[str] = []
    for run in runs:
        try:
            hosts = _clean_hosts(run, sink) if run.job is None and run.way not in RELEASES else {}
            if run.way in RELEASES:  # its processes end with its hosts, as those of a job do
                RELEASES[run.way](run.run, run.hosts)
        except HetctlError as error:  # the others are cleaned all the same
            silent.append(f"{run.name} ({error.message})")
            continue
        silent += [f"{name} ({about['problem']})" for name, about in hosts.items() if "problem" in about]
        if all(about.get("left") == 0 for about in hosts.values()):
            delist(run.run)
        told[run.name] = hosts
    if not runs:
        sink.say("nothing to clean: no lost run is on file")
    if silent:
        raise Unreachable(f"could not verify {', '.join(silent)}", hint="run `hetctl clean` again when it is back")
    return {"cleaned": told}


def find_folder(word: str | None) -> RunFolder:
    """A run's folder by name, path, or (None) the newest. Raises ConfigError."""
    for place in [Path(word), Path("runs") / word] if word else [Path("runs/latest")]:
        if (place / "launch").is_dir():
            return RunFolder(place.resolve())
    if word is None:
        hint = "`hetctl train` makes runs in ./runs: go where you typed it, or name the run's folder"
        raise ConfigError("there is no runs/latest here", hint=hint)
    runs = active()
    if any(word in (run.run, run.name) for run in runs):
        return RunFolder(Path(find(word, runs).folder))
    names = {path.resolve().name for path in runs_here()} | {run.name for run in runs}
    hint = f"{nearest(word, names)} (`hetctl ps -a`)" if names else "./runs holds none: name the run's folder"
    raise ConfigError(f"there is no run '{word}'", hint=hint)


def _clean_hosts(run: ActiveRun, sink: Sink) -> dict[str, dict[str, Any]]:
    known = STILL_OPEN.get(run.way, dict)(run.hosts)
    if closed := [name for name in run.hosts if name not in known]:
        sink.say(f"{run.name} on {listed(closed, 8)}: its processes end with the job that held these hosts")
    hosts = [Host(name, access=access, data_address="unused") for name, access in known.items()]
    found: dict[str, dict[str, Any]] = {}
    with Entrance(run.way) as entrance:

        def work(host: Host, deadline: Deadline) -> dict[str, Any]:
            return ask(target_of(host, entrance), {"do": "clean", "run": run.run}, "cleaned", deadline)

        for outcome in fan_out(hosts, work, deadline_s=CLEAN_S):
            about = {k: (outcome.value or {}).get(k) for k in ("found", "left")}
            found[outcome.item.name] = about if outcome.value else {"problem": str(outcome.error)}
            words = f"{about['found']} processes found, {about['left']} left" if outcome.value else str(outcome.error)
            sink.say(f"{run.name} on {outcome.item.name}: {words}")
    return found


def _meant(sink: Sink) -> ActiveRun:
    """The only run there is; of several the one that a person names, by name or number. Raises ConfigError."""
    running = [run for run in active() if run.supervised]
    if len(running) == 1:
        return running[0]
    if not running:
        raise ConfigError("no run is running here", hint="`hetctl ps -a` lists those that were")
    names = [run.name for run in running]
    for number, run in enumerate(running, 1):
        sink.warn(f"{number}: {run.name} ({run.folder})")
    answer = sink.ask(f"stop which run? 1 to {len(running)}, or a name")
    if answer is None:
        raise ConfigError(f"which run? running are: {', '.join(names)}", hint="hetctl stop RUN")
    numbers = {str(number): run for number, run in enumerate(running, 1)}
    return numbers[answer] if answer in numbers else find(answer, running)


def is_running(folder: RunFolder) -> bool:
    """Whether a supervisor on this machine has it under way."""
    return any(run.supervised for run in active() if run.folder == str(folder.path))


def _progress(folder: RunFolder) -> int | None:
    """The last step that was written down; None before the first, and for programs that have none."""
    metrics = folder.read_metrics()
    return int(metrics[-1]["step"]) if metrics else None
