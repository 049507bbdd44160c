"""`hetctl setup`: on every host a virtual environment with the torch of its GPUs' vendor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hetctl.comm.contract.units import count_of
from hetctl.commands import options
from hetctl.commands.discover import Hosts, InventoryPath
from hetctl.console import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetctl.discovery.execute import HostOutput
    from hetctl.discovery.inventory import InventoryHost
    from hetctl.doctor.setup import Setup


def setup(
    hosts: Hosts = None,
    inventory: InventoryPath = None,
    python: Annotated[
        str | None, typer.Option("--python", help="3.11, or a path there; otherwise each host's.", show_default=False)
    ] = None,
    path: Annotated[str, typer.Option("--path", help="Of the environments, on the hosts.")] = "~/hetctl-env",
    wheels: Annotated[
        str | None,
        typer.Option(
            "--wheels", metavar="URL", help="A mirror of https://download.pytorch.org/whl.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be typed, then end.")] = False,
    timeout: options.Timeout = 1800.0,
    as_json: options.Json = False,
) -> None:
    """Make a virtual environment with torch on hosts: for the GPUs that each has, after showing what will be typed.

    Hosts are named as for `hetctl discover`. It can be repeated. Exit code 1: it failed somewhere, or was declined;
    4: a host was not reached.
    """
    from hetctl.comm.contract.values import encode
    from hetctl.discovery.discover import discover
    from hetctl.discovery.execute import exit_code_of, folded
    from hetctl.discovery.inventory import resolve
    from hetctl.doctor.setup import exit_code_of_setups, inventory_lines, setups
    from hetctl.doctor.software import WHEELS

    sink = Sink(as_json=as_json)
    entries = resolve(hosts or [], inventory).entries
    if python:
        name = f"python{python}" if python[0].isdigit() else python
        entries = tuple(replace(entry, access=replace(entry.access, python=name)) for entry in entries)
    with sink.trying(f"looking at {count_of(len(entries), 'host')}"):
        reports = [answer.report for answer in discover(entries)]
    planned = setups(reports, path=path, wheels=wheels or WHEELS)
    for names, _, shown in folded(planned, lambda one: one.shown):
        sink.say(f"{names} {shown}")
    for names, _, problem in folded(planned, lambda one: one.problem):
        sink.warn(f"{names}: {problem}")
    able = [one for one in planned if one.lines]
    if able and not dry_run and not yes:
        typer.confirm(f"Type this on {count_of(len(able), 'host')}?", default=False, err=True, abort=True)
    outputs = [] if dry_run else _type(able, entries, timeout, sink)
    made = inventory_lines(planned, outputs)
    if made:
        sink.say("\n".join(["in inventory.yaml:", *made]))
    sink.result(
        {
            "hosts": [encode(o) for o in planned],
            "outputs": [encode(o) for o in outputs],
            "inventory": made,
            "dry_run": dry_run,
        }
    )
    if code := max(exit_code_of(outputs), exit_code_of_setups(planned)):
        raise typer.Exit(code)


def _type(able: list[Setup], entries: Sequence[InventoryHost], timeout: float, sink: Sink) -> list[HostOutput]:
    """Run each host's lines, all hosts at once, and show what they print."""
    from hetctl.discovery.execute import execute_line, show_outputs

    lines = {one.name: " && ".join(one.lines) for one in able}
    chosen = [entry for entry in entries if entry.name in lines]
    with sink.trying(f"setting up {count_of(len(chosen), 'host')}") as show:
        outputs = execute_line(chosen, lambda e: lines[e.name], timeout_s=timeout, on_output=lambda o: show(o.name))
    show_outputs(sink, outputs)
    return outputs
