"""`hetctl ps | logs | stop | clean | report`: runs after they were started."""

from __future__ import annotations

from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


def ps(as_json: options.Json = False) -> None:
    """List the runs started from this machine that run, or whose supervisor was lost."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result({"runs": manage.list_runs(sink)})


def logs(
    run: options.MaybeRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show what the ranks of a run print (by default of runs/latest)."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result(manage.show_logs(run, follow=follow, ranks=rank, sink=sink))


def stop(
    run: options.MaybeRun = None,
    now: Annotated[bool, typer.Option("--now", help="Do not let the ranks finish their step and save.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 90.0,
    as_json: options.Json = False,
) -> None:
    """Stop a run: its ranks finish their step, save, and end. Without a name: the only one that runs."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result(manage.stop_run(run, now=now, timeout_s=timeout, sink=sink))


def clean(run: options.MaybeRun = None, as_json: options.Json = False) -> None:
    """End what a lost run left on its hosts, found by the run's mark on its processes, and verify it."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result(manage.clean_runs(run, sink=sink))


def report(run: options.MaybeRun = None, as_json: options.Json = False) -> None:
    """Write a run's report.html anew and show its figures, also while it is under way (by default of runs/latest)."""
    from hetctl.runs import report

    sink = Sink(as_json=as_json)
    sink.result(report.report_run(run, sink))
