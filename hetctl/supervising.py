"""What `train` and `run` share once ranks are specified: see them through, say what failed, and end rightly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from hetctl.comm.errors import Interrupted, WorkFailed
from hetctl.comm.files import write_json
from hetctl.launcher.failure import find_failure, read_rank_error
from hetctl.launcher.runfolder import RunFolder
from hetctl.launcher.supervisor import Event, HostSpec, Outcome, Supervisor


def supervise(hosts: list[HostSpec], on_event: Callable[[Event], None], *, say: Callable[[str], None]) -> Outcome:
    """Run the hosts' agents to their end; Ctrl-C or TERM stops the ranks, a second one at once."""
    supervisor = Supervisor(hosts, on_event)
    with _signals(supervisor, say):
        return supervisor.run()


def record_failure(folder: RunFolder, outcome: Outcome, hosts: Sequence[str]) -> dict[str, Any] | None:
    """What failed first, also written to failure.json; None (and no such file) when nothing did."""
    errors = {r: e for r in range(len(hosts)) if (e := read_rank_error(folder.error_file(r)))}
    failure = find_failure(outcome.exits, hosts, errors)
    if failure is None:
        folder.failure.unlink(missing_ok=True)
        return None
    record = {**asdict(failure), "log": str(folder.log(failure.rank))}
    write_json(folder.failure, record)
    return record


def raise_unless_done(summary: dict[str, Any]) -> None:
    """The exit code of a run: failures 1, interruptions 130. Raises the matching HetctlError."""
    if summary["status"] == "interrupted":
        hint = f"its folder is {summary['run_dir']}"
        raise Interrupted("the run was interrupted", hint=hint, documented=True)
    if summary["status"] == "failed":
        hint = f"see {summary['run_dir']}/failure.json"
        raise WorkFailed(f"the run failed: {summary['failure']}", hint=hint, documented=True)


@contextmanager
def _signals(supervisor: Supervisor, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C or TERM once: stop in order. Twice: at once."""

    def handler(*_: object) -> None:
        say("stopping: the ranks finish their step and save (again: at once)")
        supervisor.stop()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
