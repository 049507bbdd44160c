"""`hetctl hosts`: who is in the inventory, and trusting a host's key after comparing its fingerprint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetctl.comm.contract.units import count_of
from hetctl.commands import options
from hetctl.commands.discover import Hosts, InventoryPath
from hetctl.console import Sink

if TYPE_CHECKING:
    from hetctl.discovery.trust import Shown

app = typer.Typer(name="hosts", help="The hosts of the inventory, and their SSH keys.", no_args_is_help=True)


@app.command("list")
def list_hosts(hosts: Hosts = None, inventory: InventoryPath = None, as_json: options.Json = False) -> None:
    """List the hosts that `hetctl discover` would ask, and how they are reached."""
    from rich.table import Table

    from hetctl.comm.contract.values import encode
    from hetctl.discovery.inventory import resolve

    sink = Sink(as_json=as_json)
    meant = resolve(hosts or [], inventory)
    table = Table(box=None, pad_edge=False)
    for head in ("host", "address", "user", "jump", "python", "group"):
        table.add_column(head)
    for entry in meant.entries:
        access = entry.access
        where = "this machine" if access.local else f"{access.address}{f':{access.port}' if access.port else ''}"
        pythons = ", ".join(f"{vendor}: {path}" for vendor, path in access.pythons.items()) or access.python
        table.add_row(entry.name, where, access.user, access.proxy_jump, pythons, entry.group)
    sink.say(table)
    sink.say(f"{len(meant.entries)} from {meant.origin}")
    sink.result({"origin": meant.origin, "hosts": encode(meant.entries)})


@app.command("trust")
def trust(
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="Hosts or groups whose keys to pin.")],
    inventory: InventoryPath = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the fingerprints were compared elsewhere.")] = False,
    timeout: options.Timeout = 20.0,
    as_json: options.Json = False,
) -> None:
    """Show the SSH host keys of hosts, ask, and pin them in ~/.ssh/known_hosts.

    A key that changed is never replaced: remove the old one yourself, once you know why it changed.
    """
    from hetctl.comm.contract.errors import Unreachable
    from hetctl.discovery.inventory import resolve
    from hetctl.discovery.trust import fetch_keys, pin_keys

    sink = Sink(as_json=as_json)
    shown = fetch_keys(resolve(hosts, inventory).entries, timeout_s=timeout)
    for one in shown:
        _show(sink, one)
    fresh = [one for one in shown if one.fresh]
    pinned = bool(fresh) and (yes or _agreed(fresh))
    if pinned:
        for one in fresh:
            pin_keys(one)
        sink.say(f"pinned {len(fresh)} in known_hosts")
    sink.result({"hosts": [one.document(pinned=pinned and bool(one.fresh)) for one in shown]})
    failed = [one.name for one in shown if one.problem]
    if failed:
        sink.warn(f"not pinned: {', '.join(failed)}")
        raise typer.Exit(Unreachable.exit_code)
    if fresh and not pinned:
        raise typer.Exit(1)


def _show(sink: Sink, one: Shown) -> None:
    if one.problem:
        sink.warn(f"{one.name}: {one.problem}")
    elif not one.fresh:
        sink.say(f"{one.name}: known already")
    for key in one.fresh:
        sink.say(f"{one.name}: {key.kind} {key.fingerprint}")


def _agreed(fresh: list[Shown]) -> bool:
    hosts = count_of(len(fresh), "host")
    return typer.confirm(f"Are these the fingerprints of {hosts} as you know them?", default=False, err=True)
