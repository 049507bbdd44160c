"""`hetctl export`: a run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import completion, options
from hetctl.console import Sink


class Precision(StrEnum):
    """What weights are written in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's name or folder, or one of its checkpoints; left out: runs/latest.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    *,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where to write it; must not hold a model yet.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="N|best", help="Its checkpoint of that step, or of the lowest validation loss."),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the weights.")] = Precision.bf16,
    merge: Annotated[bool, typer.Option("--merge", help="Adapters become part of the weights they adapt.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write a run's newest checkpoint as a folder that transformers, vLLM and others load.

    config.json, safetensors (with an index where there are several files), and the tokenizer that made its tokens.
    Of a run with --lora the adapters alone, as PEFT loads them, or with --merge the whole model.
    """
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.runs.export import export_run

    sink = Sink(as_json=as_json)
    if to is None:
        words = ["hetctl", "export", *([run] if run else []), "--to", "my-model"]
        raise ConfigError("nothing names the folder that the model is written to", hint=shlex.join(words))
    document = export_run(run, to, step=step, precision=precision.value, merge=merge, sink=sink)
    sink.say(f"wrote {document['parameters']:,} parameters of step {document['step']} to {document['to']}")
    sink.result(document)
