"""`hetctl run`: any torch.distributed program on the islands of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


def run(
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- python SCRIPT ...", help="The program each rank runs.", show_default=False),
    ],
    cluster: options.ClusterFile = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Take islands and bridges from this plan.", rich_help_panel="Where")
    ] = None,
    emulate: options.Emulate = None,
    bridge: options.Bridge = None,
    as_nccl: Annotated[
        bool, typer.Option("--as-nccl", help="A program that asks for nccl gets het for groups across islands.")
    ] = False,
    verify_bridge: Annotated[bool, typer.Option("--verify-bridge", help="Checksum every chunk that crosses.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; otherwise runs/<time>-<program>.")] = None,
    launcher: options.Launcher = "auto",
    detach: options.Detach = False,
    as_json: options.Json = False,
) -> None:
    """Run a torch.distributed program across islands.

    Each rank gets torchrun's environment and the back end `het`: `dist.init_process_group("het")` gives native
    groups inside an island and bridged ones across. `python` becomes the host's configured interpreter.
    """
    from hetctl.runs.program import run_program
    from hetctl.runs.supervise import raise_unless_done

    sink = Sink(as_json=as_json)
    if detach:
        from hetctl.runs.detach import detach as in_background

        sink.result(in_background(sys.argv[1:], run_dir, label=Path(program[-1]).stem, sink=sink))
        return
    summary = run_program(
        program,
        cluster_file=cluster,
        plan_file=plan_file,
        emulate=emulate,
        bridge=bridge,
        as_nccl=as_nccl,
        verify_bridge=verify_bridge,
        run_dir=run_dir,
        way=launcher,
        sink=sink,
    )
    sink.result(summary)
    raise_unless_done(summary)
