"""`hetctl doctor`: what is wrong with these hosts, why, and what to type."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetctl.comm.contract.units import count_of
from hetctl.commands import options
from hetctl.commands.discover import HeldBy, Hosts, InventoryPath
from hetctl.console import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetctl.doctor.check import Check
    from hetctl.doctor.runner import CheckRun


class Level(StrEnum):
    """What is done beside reading."""

    quick = "quick"
    perf = "perf"
    pairs = "pairs"


def doctor(
    hosts: Hosts = None,
    inventory: InventoryPath = None,
    engine: HeldBy = None,
    level: Annotated[
        Level,
        typer.Option(help="quick reads; perf also computes on every device; pairs also tries every pair of hosts."),
    ] = Level.quick,
    only: options.Only = None,
    skip: Annotated[
        str | None, typer.Option(metavar="ID,..", help="Not these checks or themes.", show_default=False)
    ] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option("--folder", metavar="PATH", help="Also try to write here, on every host (checkpoints, data)."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be checked, and stop.")] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Read a run's folder instead: who waited for whom, and why."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write passing.txt and failing.txt (hosts) into this folder.")
    ] = None,
    timeout: options.Timeout = 60.0,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Every reason, also of what is well.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say what is wrong with hosts, networks, GPUs and software, why, and what to type.

    Hosts are named as for `hetctl discover`. Nothing on the hosts is changed, and no root is needed. Exit
    code 0: all well (warnings only); 1: something failed; 3: something essential could not be determined; 4: hosts were
    not reached.
    """
    from hetctl.doctor.registry import THEMES, choose
    from hetctl.doctor.runner import exit_code
    from hetctl.doctor.tables import check_table, document, list_document, show_findings

    sink = Sink(as_json=as_json)
    if run is not None:
        _read_run(run, sink)
        return
    checks = choose(level=level.value, only=options.words(only), skip=options.words(skip))
    if show_list:
        every = checks if only or skip else choose(level="quick", only=THEMES)
        sink.say(check_table(every))
        sink.result(list_document(every))
        return
    found = _examined(hosts or [], inventory, engine, checks, folder or [], timeout, sink)
    show_findings(sink, found, verbose=verbose)
    if output is not None:
        _write_lists(output, found, sink)
    sink.result(document(found, level=level.value))
    if code := exit_code(found.findings):
        raise typer.Exit(code)


def _examined(
    hosts: list[str],
    file: Path | None,
    engine: str | None,
    checks: Sequence[Check],
    folders: list[str],
    timeout: float,
    sink: Sink,
) -> CheckRun:
    from hetctl.discovery.meant import enterable_hosts
    from hetctl.doctor.runner import examine

    meant = enterable_hosts(hosts, file, engine)
    count = len(meant.entries)
    sink.warn(f"examining {count_of(count, 'host')} from {meant.origin}")
    return examine(meant, checks, timeout_s=timeout, folders=folders, say=sink.warn)


def _write_lists(folder: Path, found: CheckRun, sink: Sink) -> None:
    """Host lists that the inventory, `pdsh -w ^file` and Slurm understand: one name a line."""
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.comm.contract.files import write_atomically

    bad = {f.host for f in found.findings if f.state == "fail"}
    names = [r.name for r in found.checked.reports]
    # a finding on a pair or a group blames nobody in particular: its hosts pass unless a finding of their own fails
    lists = {"passing.txt": [n for n in names if n not in bad], "failing.txt": [n for n in names if n in bad]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, hosts in lists.items():
            write_atomically(folder / name, "".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise ConfigError(f"the host lists cannot be written: {error}") from None
    sink.say(f"wrote {folder / 'passing.txt'} and {folder / 'failing.txt'}")


def _read_run(run: str, sink: Sink) -> None:
    from hetctl.doctor.runs import diagnose, find_run
    from hetctl.doctor.tables import show_diagnosis

    found = diagnose(find_run(run))
    show_diagnosis(sink, found)
    sink.result(found.document)
    if found.failed:
        raise typer.Exit(1)
