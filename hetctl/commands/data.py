"""`hetctl data show`: what a model is trained on, as it meets it."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink

app = typer.Typer(name="data", help="What a model is trained on.", no_args_is_help=True)


@app.command("show")
@options.takes("recipe", "model", "data", "seq_len", "settings")
def show(
    asked: options.RunOptions,
    number: Annotated[int, typer.Option("--number", "-n", min=0, help="Samples to show of each source.")] = 3,
    as_json: options.Json = False,
) -> None:
    """Show samples as the model meets them: rendered by its chat template, as tokens, and which of them bear loss.

    Then what there is: conversations or preference pairs, those cut or dropped as too long, tokens, and the share of
    them that bear loss.
    """
    from hetctl.commands.resolve import with_length
    from hetctl.render.samples import sample_lines, sample_row
    from hetctl.trainer.data.datasets import open_sides
    from hetctl.trainer.data.samples import first_samples
    from hetctl.trainer.data.sources import is_pairs
    from hetctl.trainer.recipe import given_keys, load_recipe

    sink = Sink(as_json=as_json)
    recipe = load_recipe(asked.recipe, asked.overrides)
    recipe = with_length(recipe, None, sink, given=given_keys(asked.recipe, asked.overrides))
    seq_len, vocabulary = recipe.model.seq_len, recipe.shape().vocab
    rows = []
    for one in recipe.data.each:
        for sample in islice(first_samples(one), number * (1 + is_pairs(one))):
            sink.say(sample_lines(sample))
            rows.append({"source": one.source, **sample_row(sample)})
    sides = open_sides(recipe.data, seq_len=seq_len, global_batch=recipe.batch.global_batch, vocabulary=vocabulary)
    counts = []
    for source, training, validation in sides.talks:
        for side, talks in (("training", training), ("validation", validation)):
            found = talks.counts()
            share = found["tokens_with_loss"] / found["tokens"]
            sink.say(f"{source}, {side}: {talks.said}; {found['tokens']:,} tokens, {share:.1%} of them bear loss")
            counts.append({"source": source, "side": side, **found, "loss_share": share})
    sink.result({"samples": rows, "seq_len": seq_len, "counts": counts})
