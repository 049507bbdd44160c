"""`hetctl estimate`: what fits and how fast, before anything is downloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from hetctl.commands import completion, options
from hetctl.console import Sink


@options.takes("cluster", "hardware", "device", "link", "seq_len", "global_batch", "settings")
def estimate(
    asked: options.RunOptions,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A known name (`hetctl models`), or a config.json or its folder.",
            autocompletion=completion.models,
        ),
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "--emulate",
            metavar="SPEC|F",
            help="What there is, as --emulate of `hetctl plan`: rtx4090:1,rx7900xtx:1.",
            rich_help_panel="Where",
            autocompletion=completion.device_classes,
        ),
    ] = None,
    lora: Annotated[int, typer.Option("--lora", metavar="RANK", help="Of the adapters.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Say what training a model takes, all weights and adapters (LoRA), before anything is downloaded.

    Alone: what one device would hold, and the smallest that will do. With --devices or --cluster: what `hetctl plan`
    says of them, which ways fit and how fast, or what would. Exit code 5: none fits.
    """
    from hetctl.comm.contract.errors import ConfigError, Infeasible
    from hetctl.commands.resolve import resolve, with_length
    from hetctl.render.estimate import estimate_document, show_estimates
    from hetctl.trainer.planning.estimate import Estimate, estimated, on_one_device, smallest, ways
    from hetctl.trainer.planning.executable import check_trainable
    from hetctl.trainer.planning.hardware import CLASSES
    from hetctl.trainer.planning.own_hardware import own_classes
    from hetctl.trainer.planning.precision import precision_of
    from hetctl.trainer.recipe import given_keys, load_recipe

    sink = Sink(as_json=as_json)
    asked = replace(asked, model=model, emulate=devices, lora=lora)
    if devices or asked.cluster:
        found = resolve(asked, sink, runs=False)
        recipe, precision = found.recipe, precision_of(found.cluster, found.recipe)
        made = [estimated(way, found.cluster) for way in ways(recipe)]
    else:
        if asked.link:
            raise ConfigError("--link joins islands, and none are named", hint="--devices rtx4090:1,rx7900xtx:1")
        recipe = load_recipe(None, asked.overrides)
        recipe = with_length(recipe, None, sink, given=given_keys(None, asked.overrides))
        table = CLASSES.with_own(own_classes(asked.hardware, asked.device or ()))
        precision = "bf16" if recipe.train.precision == "auto" else recipe.train.precision
        made = [
            Estimate(
                way,
                on_one_device(way.recipe, precision),
                smallest(way.recipe, table, global_batch=asked.global_batch),
            )
            for way in ways(recipe)
        ]
    try:
        check_trainable(recipe.shape())
    except ConfigError as error:
        sink.warn(error.message)
    document = estimate_document(recipe, precision, made)
    show_estimates(sink, recipe, precision, made)
    if all(one.refused for one in made):
        failure = Infeasible(f"no way of training {recipe.shape().name} fits", documented=as_json)
        sink.result({**document, "error": failure.message, "hint": failure.hint, "exit_code": failure.exit_code})
        raise failure
    sink.result(document)
