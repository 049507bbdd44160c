"""`ps`, `logs`, `stop`, `clean`: what runs were started from here, what they print, and ending what they left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract.cluster import Host
from hetctl.comm.contract.errors import ConfigError, Unreachable, WorkFailed
from hetctl.comm.contract.units import listed, show_seconds
from hetctl.console import Sink
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.logs import Follower, clean
from hetctl.launcher.run_folder.registry import ActiveRun, active, delist, find
from hetctl.launcher.supervisor.agents import ask
from hetctl.launcher.supervisor.launch import shell_opener, target_of

CLEAN_S = 30.0
TAIL_LINES = 200
TAIL_BYTES = 256 << 10  # of each rank's log, where lines are long
FOLLOW_S = 0.2


def list_runs(sink: Sink) -> list[dict[str, Any]]:
    """All runs on file, shown with how far they are; the document for scripts."""
    table = Table("run", "state", "step", "hosts", "for", "folder")
    rows = []
    for run in active():
        state = "running" if run.supervised else "lost: its supervisor is gone (hetctl clean)"
        age, steps = time.time() - run.started, _progress(RunFolder(Path(run.folder)))
        hosts = listed(list(run.hosts), 8)
        row = (run.name, state, "-" if steps is None else str(steps), hosts, show_seconds(age), run.folder)
        table.add_row(*map(escape, row))
        about = {"run": run.name, "state": "running" if run.supervised else "lost", "hosts": list(run.hosts)}
        rows.append({**about, "pid": run.pid, "folder": run.folder, "seconds": age, "step": steps})
    sink.say(table if rows else "no run was started from here that did not end cleanly")
    return rows


def stop_run(word: str | None, *, now: bool, timeout_s: float, sink: Sink) -> dict[str, Any]:
    """Ask a run's supervisor to stop (the only one there is, without a word), and wait for it.

    Raises WorkFailed when it does not end in time.
    """
    run = find(word, active()) if word else _only_one()
    if not run.supervised:
        raise ConfigError(f"the supervisor of {run.name} is gone", hint=f"hetctl clean {run.name}")
    if not now:
        sink.say(f"{run.name} finishes its step and saves (--now ends it at once)")
    for _ in range(2 if now else 1):
        os.kill(run.pid, signal.SIGTERM)
        time.sleep(0.2)
    until = time.monotonic() + timeout_s
    while run.supervised:
        if time.monotonic() > until:
            raise WorkFailed(f"{run.name} is still ending", hint=f"hetctl stop --now {run.name} ends it at once")
        time.sleep(0.1)
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
        hosts = _clean_hosts(run, sink)
        silent += [f"{name} ({about['problem']})" for name, about in hosts.items() if "problem" in about]
        if all(about.get("left") == 0 for about in hosts.values()):
            delist(run.run)
        told[run.name] = hosts
    if not runs:
        sink.say("nothing to clean: no lost run is on file")
    if silent:
        raise Unreachable(f"could not verify {', '.join(silent)}", hint="run `hetctl clean` again when it is back")
    return {"cleaned": told}


def show_logs(word: str | None, *, follow: bool, ranks: list[int] | None, sink: Sink) -> dict[str, Any]:
    """The end of the ranks' logs of a run, and with `follow` what they print from now on, until it ends (or Ctrl-C).

    The document holds the lines that were shown, where a script asked for it.
    """
    folder = find_folder(word)
    lines: list[dict[str, Any]] = []
    try:
        while not (logs := _logs(folder, ranks)) and follow and is_running(folder):
            time.sleep(FOLLOW_S)  # it has only begun
        if not logs:
            raise ConfigError(f"{folder.path} holds no logs" + (f" of ranks {ranks}" if ranks else ""))

        def show(rank: int, line: str) -> None:
            if sink.as_json:
                lines.append({"rank": rank, "line": line})
            else:
                sink.people.print(f"[{rank}] {line}", highlight=False, markup=False, soft_wrap=True)

        ends = {rank: _show_end(rank, path, show) for rank, path in logs.items()}
        with Follower(logs if follow else {}, show, begin=ends):
            while follow and is_running(folder):
                time.sleep(FOLLOW_S)
    except KeyboardInterrupt:  # the way to leave `-f`; the run goes on
        pass
    return {"run": folder.name, "lines": lines}


def find_folder(word: str | None) -> RunFolder:
    """A run's folder by name, path, or (None) the newest. Raises ConfigError."""
    for place in [Path(word), Path("runs") / word] if word else [Path("runs/latest")]:
        if (place / "launch").is_dir():
            return RunFolder(place.resolve())
    if word:
        return RunFolder(Path(find(word, active()).folder))
    raise ConfigError("there is no runs/latest here", hint="name a run or its folder")


def _clean_hosts(run: ActiveRun, sink: Sink) -> dict[str, dict[str, Any]]:
    hosts = [Host(name, access=access, data_address="unused") for name, access in run.hosts.items()]
    open_shell, close = shell_opener(run.way)
    found: dict[str, dict[str, Any]] = {}

    def work(host: Host, deadline: Deadline) -> dict[str, Any]:
        return ask(target_of(host, open_shell), {"do": "clean", "run": run.run}, "cleaned", deadline)

    try:
        for outcome in fan_out(hosts, work, deadline_s=CLEAN_S):
            about = {k: (outcome.value or {}).get(k) for k in ("found", "left")}
            found[outcome.item.name] = about if outcome.value else {"problem": str(outcome.error)}
            words = f"{about['found']} processes found, {about['left']} left" if outcome.value else str(outcome.error)
            sink.say(f"{run.name} on {outcome.item.name}: {words}")
    finally:
        close()
    return found


def _only_one() -> ActiveRun:
    running = [run for run in active() if run.supervised]
    if len(running) != 1:
        names = ", ".join(run.name for run in running) or "none"
        raise ConfigError(f"which run? running are: {names}", hint="hetctl stop RUN")
    return running[0]


def _logs(folder: RunFolder, ranks: list[int] | None) -> dict[int, Path]:
    present = {_rank(p): p for p in folder.path.glob("logs/rank-*.log")}
    return {r: p for r, p in sorted(present.items()) if not ranks or r in ranks}


def is_running(folder: RunFolder) -> bool:
    """Whether a supervisor on this machine has it under way."""
    return any(run.supervised for run in active() if run.folder == str(folder.path))


def _show_end(rank: int, path: Path, show: Callable[[int, str], None]) -> int:
    """Show a log's last lines; returns how far it was read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(size - file.tell())
    whole, newline, _ = data.rpartition(b"\n")
    for line in whole.decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]:
        show(rank, clean(line))
    return size - len(data) + len(whole) + len(newline)


def _progress(folder: RunFolder) -> int | None:
    """The last step that was written down; None before the first, and for programs that have none."""
    metrics = folder.read_metrics()
    return int(metrics[-1]["step"]) if metrics else None


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))
