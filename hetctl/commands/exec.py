"""`hetctl exec`: one command on many hosts."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

from hetctl.comm.contract.units import count_of
from hetctl.commands import options
from hetctl.commands.discover import HeldBy, Hosts, InventoryPath
from hetctl.console import Sink


class AfterDashes(TyperCommand):
    """A command line whose words after the first `--` are a command of their own: `context.obj`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().collect_usage_pieces(ctx), "-- COMMAND ..."]


def execute(
    context: typer.Context,
    hosts: Hosts = None,
    inventory: InventoryPath = None,
    engine: HeldBy = None,
    timeout: options.Timeout = 60.0,
    as_json: options.Json = False,
) -> None:
    """Run a command on hosts; those that print the same are shown together.

    Hosts are named as for `hetctl discover`. Several words are given to the command as they are; a single one is read
    by the host's shell: `-- 'df -h | grep data'`. `python` is the host's configured one. Exit code 1: it failed
    somewhere; 4: a host was not reached, or was not ready in time (then the command may go on there).
    """
    from hetctl.comm.contract.values import encode
    from hetctl.discovery.execute import execute_line, exit_code_of, line_of, show_outputs
    from hetctl.discovery.meant import enterable_hosts

    sink = Sink(as_json=as_json)
    entries = enterable_hosts(hosts or [], inventory, engine).entries
    lines = {entry.name: line_of(context.obj, entry) for entry in entries}
    with sink.trying(f"running it on {count_of(len(entries), 'host')}") as show:
        outputs = execute_line(entries, lambda e: lines[e.name], timeout_s=timeout, on_output=lambda o: show(o.name))
    show_outputs(sink, outputs)
    sink.result({"command": context.obj, "hosts": [encode(one) for one in outputs]})
    if code := exit_code_of(outputs):
        raise typer.Exit(code)
