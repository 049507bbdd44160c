"""`hetctl ps | logs | stop | clean | report`: runs after they were started."""

from __future__ import annotations

from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


def ps(
    every: Annotated[
        bool, typer.Option("-a", "--all", help="Also those of ./runs that have ended, newest first.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the runs started from this machine that run, or whose supervisor was lost; -a: what became of all."""
    from hetctl.runs import history, manage

    sink = Sink(as_json=as_json)
    if every:
        rows = history.past_runs()
        sink.say(history.past_table(rows) if rows else "no run was started from here, and ./runs holds none")
        sink.result({"runs": rows})
        return
    sink.result({"runs": manage.list_runs(sink)})


def logs(
    run: options.MaybeRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Only what this rank prints; may be repeated.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show how far a run is, then what its ranks print (by default of runs/latest)."""
    from hetctl.runs.logs import show_logs

    sink = Sink(as_json=as_json)
    sink.result(show_logs(run, follow=follow, ranks=rank, sink=sink))


def stop(
    run: options.MaybeRun = None,
    now: Annotated[bool, typer.Option("--now", help="Do not let the ranks finish their step and save.")] = False,
    timeout: Annotated[float, typer.Option(callback=options.bounded, help="Seconds to wait for its end.")] = 90.0,
    as_json: options.Json = False,
) -> None:
    """Stop a run: its ranks finish their step, save, and end. Without a name: the only one, or it asks."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result(manage.stop_run(run, now=now, timeout_s=timeout, sink=sink))


def clean(run: options.MaybeRun = None, as_json: options.Json = False) -> None:
    """End what a lost run left on its hosts, found by the run's mark on its processes, and verify it."""
    from hetctl.runs import manage

    sink = Sink(as_json=as_json)
    sink.result(manage.clean_runs(run, sink=sink))


def report(
    run: options.MaybeRun = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine's loopback, and follow the run.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --serve; 0: any that is free.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Write a run's report.html anew and show its figures, also while it is under way (by default of runs/latest)."""
    from hetctl.runs import report, serve_report

    sink = Sink(as_json=as_json)
    if serve:
        serve_report.serve_report(run, port, sink)
        return
    sink.result(report.report_run(run, sink))
