"""`hetctl bench`: measurements that feed the planner, and that users trust."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink

app = typer.Typer(help="Measure what a plan stands on: pipelines, bridges, links, operations.", no_args_is_help=True)


@app.command("pipeline")
def pipeline(
    emulate: Annotated[
        str, typer.Option("--emulate", metavar="SPEC", help="One island per stage, on this machine.")
    ] = "h200:1,mi325x:1",
    model: Annotated[str, typer.Option("--model", help="The model's shape.")] = "demo",
    seq_len: options.SeqLen = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of one sample a step.")] = 16,
    settings: options.Settings = None,
    bridge: options.Bridge = None,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one that does not.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Tokens/s of one pipeline over native groups, over the bridge, and with naive copies, in turn.

    Whole training steps with random weights and random tokens, split as the planner would. The best native
    schedule is the yardstick; ratios are of the same round.
    """
    from hetctl import benching

    sink = Sink(as_json=as_json)
    result = benching.bench_pipeline(
        emulate=emulate,
        model=model,
        seq_len=seq_len,
        micro_batches=micro_batches,
        settings=settings or [],
        bridge=bridge,
        rounds=rounds,
        sink=sink,
    )
    sink.say(benching.pipeline_table(result))
    sink.result(result)


@app.command("bridge")
def bridge(
    emulate: Annotated[
        str, typer.Option("--emulate", metavar="SPEC", help="The islands, on this machine.")
    ] = "h200:1,mi325x:1",
    bridge: options.Bridge = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help="Largest message; 1GiB on GPUs, 4MiB on CPU.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Rates of messages and all-reduces from 1 KiB up, latency, and what a gigabyte costs, per transport.

    Beside them, where the islands are emulated, the native library, and raw ceilings: host copies and gloo groups.
    """
    from hetctl import bridging

    sink = Sink(as_json=as_json)
    found = bridging.bench_bridge(emulate=emulate, bridge=bridge, max_size=max_size, sink=sink)
    sink.say(bridging.bridge_table(found))
    sink.say(bridging.cost_table(found))
    sink.result(found)


@app.command("ops")
def ops(
    model: Annotated[str, typer.Option("--model", help="The model's shape.")] = "demo",
    seq_len: options.SeqLen = None,
    samples: Annotated[str, typer.Option(help="Samples per micro-batch and rank to measure at.")] = "1,2,4,8",
    device_class: Annotated[
        str | None, typer.Option("--class", help="What to call this machine's device; otherwise its own class.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Added to this profile.")] = Path("profile.yaml"),
    as_json: options.Json = False,
) -> None:
    """Seconds of each kind of layer on this machine's device, for the planner (`--profile`)."""
    from hetctl import opsbench

    sink = Sink(as_json=as_json)
    entry = opsbench.bench_ops(model=model, seq_len=seq_len, samples=samples, device_class=device_class, sink=sink)
    opsbench.add_to_profile(output, entry)
    sink.say(opsbench.table(entry))
    sink.warn(f"wrote {output}")
    sink.result(opsbench.document(entry))
