"""`hetctl run`: any torch.distributed program on the islands of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


@options.takes(*options.WHERE, "plan", "bridge")
def run(
    asked: options.RunOptions,
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- python SCRIPT ...", help="The program each rank runs.", show_default=False),
    ],
    as_nccl: Annotated[
        bool, typer.Option("--as-nccl", help="A program that asks for nccl gets het for groups across islands.")
    ] = False,
    verify_bridge: Annotated[bool, typer.Option("--verify-bridge", help="Checksum every chunk that crosses.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; otherwise runs/<time>-<program>.")] = None,
    launcher: options.Launcher = "auto",
    detach: options.Detach = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Run a torch.distributed program across islands.

    Each rank gets torchrun's environment and the back end `het`: `dist.init_process_group("het")` gives native
    groups inside an island and bridged ones across. `python` becomes the host's configured interpreter. To other hosts
    goes the script's folder, without what .gitignore and .hetctlignore name, and without keys and .env.
    """
    from hetctl.commands.resolve import lead, resolve_where
    from hetctl.launcher.run_folder.folder import create_run
    from hetctl.runs.handover import Handover, outside_allocation, run_in_background, submit
    from hetctl.runs.program import ProgramRun, check_program, run_program
    from hetctl.runs.verdict import raise_unless_done

    sink = Sink(as_json=as_json)
    if launcher == "none":
        asked = lead(asked, sink)
    where, plan = resolve_where(asked, sink)
    begun = ProgramRun(tuple(program), where, plan, asked.bridge or "auto", as_nccl, verify_bridge, launcher)
    check_program(begun, sink)
    if dry_run:
        sink.say("dry run: no host was entered, nothing was written")
        sink.result(
            {"status": "dry run", "program": begun.program, "sent": sorted(begun.sent.files if begun.sent else ())}
        )
        return
    folder = create_run(run_dir, begun.label)
    if detach or outside_allocation(launcher):
        hand_on = run_in_background if detach else submit
        sink.result(hand_on(Handover(program=begun), folder, sink))
        return
    summary = run_program(begun, folder, sink)
    sink.result(summary)
    raise_unless_done(summary)
