"""`hetctl generate`: a trained model goes on from a text."""

from __future__ import annotations

from typing import Annotated

import typer

from hetctl.commands import completion, options
from hetctl.console import Sink


def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model shall go on from.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="RUN",
            help="A run's name or folder, a checkpoint, or a Hugging Face folder; left out: runs/latest.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="N|best", help="Its checkpoint of that step, or of the lowest validation loss."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="At most so many further ones.")] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Ask by the model's chat template; left out: a run that was trained on conversations is asked so.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Let a run's newest checkpoint, or a Hugging Face folder, go on from a text with its likeliest tokens.

    After a training on conversations the text is a question, and what is printed the answer.
    On this machine's first GPU in bf16, otherwise on its CPU in fp32; the whole model must fit there.
    """
    from hetctl.runs.generate import load

    sink = Sink(as_json=as_json)
    loaded = load(model, sink, chat=chat, step=step)
    found = ""
    what = f"asking {loaded.source}" if loaded.chat else f"going on from {len(text)} characters with {loaded.source}"
    with sink.trying(what) as show:
        for piece in loaded.continued(text, most=tokens):
            found += piece
            show(found[-40:])
    sink.say(found if loaded.chat else text + found)
    sink.result({"model": loaded.source, "text": text, "continuation": found, "chat": loaded.chat})
