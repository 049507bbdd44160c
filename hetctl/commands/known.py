"""`hetctl models | devices`: what is known by name."""

from __future__ import annotations

from hetctl.commands import options
from hetctl.console import Sink


def models(as_json: options.Json = False) -> None:
    """List the models that are known by name, for --model and a recipe's model.name."""
    from hetctl.render.known import model_rows, model_table

    sink, rows = Sink(as_json=as_json), model_rows()
    sink.say(model_table(rows))
    sink.say("Any Hugging Face folder or config.json of a family that trains is one too.")
    sink.result({"models": rows})


def devices(as_json: options.Json = False) -> None:
    """List the device classes of the hardware table, for --emulate: what they are and what plans assume of them."""
    from hetctl.render.known import device_rows, device_table

    sink, rows = Sink(as_json=as_json), device_rows()
    sink.say(device_table(rows))
    sink.say("Others are estimated; hardware.yaml or --device CLASS=KEY:VALUE,.. describes your own.")
    sink.result({"devices": rows})
