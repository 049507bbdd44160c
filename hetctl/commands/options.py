"""The options that several commands share, once: names, help, and where help lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHERE, _WHAT, _HOW = "Where", "What", "How it is planned"

Recipe = Annotated[Path | None, typer.Argument(help="A recipe (YAML); left out: the demo.", show_default=False)]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="A cluster.yaml from `hetctl discover`.", rich_help_panel=_WHERE)
]
Emulate = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="SPEC|F",
        help="Islands to emulate: CLASS:COUNT\\[@SPEED]\\[~MEMORY], ',' between islands; or a cluster.yaml.",
        rich_help_panel=_WHERE,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME|config.json", help="The model's shape.", rich_help_panel=_WHAT),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", metavar="N", help="Samples per step.", rich_help_panel=_WHAT)
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", metavar="N", help="Tokens per sample.", rich_help_panel=_WHAT)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="key=value", help="Any key of the recipe, e.g. train.steps=50.", rich_help_panel=_WHAT
    ),
]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Measured costs from `hetctl bench ops`.", rich_help_panel=_HOW)
]
Speed = Annotated[
    str | None,
    typer.Option("--speed", metavar="CLASS=TFLOPS,..", help="Sustained TFLOPS per GPU.", rich_help_panel=_HOW),
]
Split = Annotated[
    str | None, typer.Option("--split", help="auto, uniform or holmes.", rich_help_panel=_HOW, show_default=False)
]
Alpha = Annotated[float | None, typer.Option("--alpha", help="Of the holmes split.", rich_help_panel=_HOW)]
Bridge = Annotated[
    str | None,
    typer.Option(
        "--bridge", help="auto, direct, rdma, tcp, shm or native; impossible ones are errors.", rich_help_panel=_HOW
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="ssh|slurm|local",
        help="How hosts are entered; by default SSH, inside a Slurm allocation srun.",
        rich_help_panel=_WHERE,
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave it running in the background of this machine; see `hetctl ps`.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")]
