"""`hetctl bench`: measurements that feed the planner, and that users trust."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hetctl.comm.contract.device_class import Precision
from hetctl.commands import options
from hetctl.console import Sink

app = typer.Typer(help="Measure what a plan stands on: pipelines, bridges, links, operations.", no_args_is_help=True)


@app.command("pipeline")
@options.takes(*options.WHERE, "model", "seq_len", "settings", "bridge")
def pipeline(
    asked: options.RunOptions,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of one sample a step.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Tokens/s of one pipeline over native groups, over the bridge, and with naive copies, in turn.

    Whole training steps with random weights and random tokens, split as the planner would. The best native
    schedule is the yardstick; ratios are of the same round.
    """
    from hetctl.bench.pipeline import SETTINGS, bench_pipeline, pipeline_table
    from hetctl.commands.resolve import resolve

    sink = Sink(as_json=as_json)
    settings = [*(asked.settings or ()), *SETTINGS]
    asked = replace(_two_islands(asked), settings=settings, global_batch=micro_batches)
    found = resolve(asked, sink, runs=True)
    result = bench_pipeline(found.cluster, found.recipe, rounds=rounds, sink=sink)
    sink.say(pipeline_table(result))
    sink.result(result)


@app.command("bridge")
@options.takes(*options.WHERE, "bridge")
def bridge(
    asked: options.RunOptions,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help="Largest message; 1GiB on GPUs, 4MiB on CPU.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Add the transports to this profile, for `--profile`.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Whether sums and messages are exact; rates from 1 KiB up, latency, and what a gigabyte costs, per transport.

    Beside them, where the islands are emulated, the native library, and raw ceilings: host copies and gloo groups.
    """
    from hetctl.bench import bridge, ops
    from hetctl.commands.resolve import resolve_where

    sink = Sink(as_json=as_json)
    where, _ = resolve_where(_two_islands(asked), sink)
    if output is not None:
        ops.refuse_profile(output)
    found = bridge.bench_bridge(where, bridge=asked.bridge, max_size=max_size, sink=sink)
    sink.say(bridge.bridge_table(found))
    sink.say(bridge.collectives_table(found))
    sink.say(bridge.cost_table(found))
    if output is not None:
        ops.add_to_profile(output, *bridge.profiles_of(found), native_sums=bridge.native_sums_of(found))
        sink.warn(f"wrote {output}")
    sink.result(found)
    bridge.raise_unless_exact(found)


def _two_islands(asked: options.RunOptions) -> options.RunOptions:
    """Of this machine, where nothing else is asked for."""
    return asked if asked.cluster or asked.emulate else replace(asked, emulate="h200:1,mi325x:1")


@app.command("links")
def links(
    cluster: options.ClusterFile = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where the cluster is written; otherwise its own file.")
    ] = None,
    timeout: options.Timeout = 60.0,
    as_json: options.Json = False,
) -> None:
    """Latency and bandwidth between a cluster's hosts, rail by rail, written into its file for the planner."""
    from hetctl.comm.contract.values import encode
    from hetctl.discovery.links import measure_file
    from hetctl.discovery.replacing import save_over

    sink = Sink(as_json=as_json)
    path = cluster or Path("cluster.yaml")
    measured = measure_file(path, timeout_s=timeout, sink=sink)
    save_over(output or path, measured, sink, force=True)
    sink.say(f"wrote {output or path}")
    sink.result({"measured": [encode(row) for row in measured.measured], "file": str(output or path)})


@app.command("plans")
@options.takes(*options.WHERE, *options.WHAT, "bridge", "profile")
def plans(
    asked: options.RunOptions,
    alternatives: Annotated[int, typer.Option(min=0, help="How many of the next best plans are run too.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count of each plan, after two that do not.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Run the chosen plan and the next best ones, and show predicted beside measured step times."""
    from hetctl.bench.plans import bench_plans, candidates, table
    from hetctl.commands.resolve import resolve

    sink = Sink(as_json=as_json)
    found = resolve(asked, sink, runs=True)
    cases = candidates(found.cluster, found.recipe, profile=found.profile, alternatives=alternatives)
    result = bench_plans(found.cluster, cases, steps=steps, sink=sink)
    sink.say(table(result))
    sink.result(result)


@app.command("ops")
def ops(
    cluster: options.ClusterFile = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's shape; demo, with --cluster the grid of shapes alone.")
    ] = None,
    seq_len: options.SeqLen = None,
    samples: Annotated[str, typer.Option(help="Samples per micro-batch and rank to measure at.")] = "1,2,4,8",
    device_class: Annotated[
        str | None, typer.Option("--class", help="What to call this machine's device; otherwise its own class.")
    ] = None,
    at_speed: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.05, max=1.0, help="Of the GPU's speed, as `--emulate CLASS@SHARE` has it."),
    ] = 1.0,
    tensor: Annotated[
        int, typer.Option("--tensor", metavar="N", min=1, help="Layers as one of so many ranks of a host has them.")
    ] = 1,
    precision: Annotated[
        Precision | None, typer.Option(help="What to compute in; otherwise bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Added to this profile.")] = Path("profile.yaml"),
    as_json: options.Json = False,
) -> None:
    """Seconds of each kind of layer on this machine's device, for the planner (`--profile`).

    With --cluster: of each device class on a host that has it, all classes at once, over a grid of shapes from which
    those of other models and lengths follow.
    """
    from hetctl.bench import ops

    sink = Sink(as_json=as_json)
    ops.refuse_profile(output)
    if cluster is not None:
        given = {"--class": device_class is not None, "--at-speed": at_speed != 1.0, "--tensor": tensor != 1}
        refused = [n for n, said in given.items() if said]
        _ops_of_cluster(cluster, model, seq_len, samples, precision, output, sink, refused=refused)
        return
    entry = ops.bench_ops(
        model=model or "demo",
        seq_len=seq_len,
        samples=samples,
        device_class=device_class,
        sink=sink,
        speed=at_speed,
        tensor=tensor,
        precision=precision,
    )
    ops.add_to_profile(output, entry)
    sink.say(ops.table(entry))
    sink.warn(f"wrote {output}")
    sink.result(ops.document(entry))


def _ops_of_cluster(
    file: Path,
    model: str | None,
    seq_len: int | None,
    samples: str,
    precision: Precision | None,
    output: Path,
    sink: Sink,
    *,
    refused: list[str],
) -> None:
    from hetctl.bench import classes
    from hetctl.bench.ops import asked_shape
    from hetctl.comm.contract.cluster import load_cluster
    from hetctl.comm.contract.errors import ConfigError

    refused += ["--seq-len without --model"] if seq_len is not None and model is None else []
    if refused:
        raise ConfigError(f"{' and '.join(refused)} does not go with --cluster, which measures devices as they are")
    more = () if model is None else (asked_shape(model, seq_len, samples),)
    found = classes.bench_classes(load_cluster(file), more, output=output, sink=sink, precision=precision)
    sink.say(classes.classes_table(found))
    if found.entries:
        sink.warn(f"wrote {output}")
    sink.result(found.document(output))
    classes.raise_unless_all(found)


@app.command("published")
def published(
    only: Annotated[str | None, typer.Option(metavar="NAME", help="One publication: its file's name.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Where publications are; otherwise the repository's."),
    ] = None,
    choose: Annotated[bool, typer.Option(help="Also what the planner would have chosen, which takes longer.")] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write published.md and its pictures there.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Other people's measurements beside what the planner predicts of their layouts, and its own choice.

    Half of the cases, by a hash of their names, are kept out of all fitting; both halves' errors are shown.
    """
    from itertools import groupby

    from hetctl.bench import published as bench
    from hetctl.comm.contract.files import refuse_unwritable

    sink = Sink(as_json=as_json)
    found = bench.publications(folder, only)
    if output is not None:
        refuse_unwritable(output / "published.md")
    result = bench.bench_published(found, choose=choose, sink=sink)
    for _, rows in groupby(result["cases"], key=lambda r: r["publication"]):
        sink.say(bench.cases_table(list(rows)))
    sink.say(bench.errors_table(result))
    sink.say(bench.orders_table(result))
    if output is not None:
        bench.write(output, found, result)
        sink.warn(f"wrote {output / 'published.md'} and its pictures")
    sink.result(result)
