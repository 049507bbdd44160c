"""Measuring programs on every rank of a launch, to their end, in a run folder that goes with them."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import Interrupted, WorkFailed
from hetctl.comm.contract.events import EngineAccount, Figures, Step, Told, present
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import on_file
from hetctl.launcher.supervisor.environment import Setting
from hetctl.launcher.supervisor.host_specs import Work, host_specs
from hetctl.launcher.supervisor.launch import Launch, given_up, held_hosts, start_agents_on
from hetctl.launcher.supervisor.supervise import record_failure, supervise


def run_ranks(
    module: str,
    launch: Launch,
    on_figures: Callable[[str, dict[str, Any]], None],
    *,
    files: Callable[[RunFolder], Mapping[str, str]],
    settings: Mapping[str, str] | None = None,
    sink: Sink,
    keep: Path | None = None,
) -> None:
    """Run a module on every seat; `files` are what variables name.

    `on_figures` hears what ranks found, by name; `keep` is a folder for their logs.

    Raises WorkFailed with the log's tail, which names the host that failed, and Interrupted.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hetctl-bench-") as temporary,
        _kept(Path(temporary), keep),
        held_hosts(launch, folder := RunFolder(Path(temporary)), sink),
        on_file(folder) as place,
    ):
        texts = files(folder)
        own = tuple(Setting(name, value, "of the measurement") for name, value in (settings or {}).items())
        agents = start_agents_on(launch, place, console=sink)
        work = Work(("python", "-m", module), lambda site: texts, own)

        def on_event(told: Told) -> None:
            if isinstance(told.event, Figures):
                on_figures(told.event.name, dict(told.event.values))
            elif isinstance(told.event, Step):
                on_figures("step", present(told.event))
            elif isinstance(told.event, EngineAccount):
                on_figures("bridge", {"rank": told.rank, **present(told.event)})

        with given_up(agents):
            specs = host_specs(agents, launch, work, run=folder.identity)
        with sink.outliving_readers():
            outcome = supervise(agents, specs, on_event, place=place, say=sink.warn)
        failure = record_failure(folder, outcome, [s.host for s in launch.seats])
        if failure:
            log = folder.log(failure["rank"])
            tail = log.read_text(errors="replace")[-1500:] if log.is_file() else ""  # its host was lost before it spoke
            error = WorkFailed(f"the measurement failed: {failure['reason']}", hint=tail)
            error.hosts = {failure["host"]: error}
            raise error
        if outcome.interrupted:
            stopped = Interrupted("the measurement was interrupted")
            stopped.exit_code = 128 + (outcome.signal or signal.SIGINT)
            raise stopped


@contextmanager
def _kept(folder: Path, keep: Path | None) -> Iterator[None]:
    """Copy the logs out of a run's folder before it goes, however the run ended."""
    try:
        yield
    finally:
        if keep is not None and (folder / "logs").is_dir():
            shutil.copytree(folder / "logs", keep, dirs_exist_ok=True)
