"""`hetctl train`: recipe and cluster to a plan, the plan to ranks, the ranks to a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetctl.comm.contract.errors import ConfigError
from hetctl.commands import options
from hetctl.console import Sink


def train(
    recipe: options.Recipe = None,
    cluster: options.ClusterFile = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan.yaml as it is.", rich_help_panel="Where")
    ] = None,
    emulate: options.Emulate = None,
    model: options.Model = None,
    global_batch: options.GlobalBatch = None,
    seq_len: options.SeqLen = None,
    settings: options.Settings = None,
    profile: options.Profile = None,
    speed: options.Speed = None,
    split: options.Split = None,
    alpha: options.Alpha = None,
    bridge: options.Bridge = None,
    resume: Annotated[
        str,
        typer.Option(help="auto continues the run in --run-dir; never starts anew; or a checkpoint's path."),
    ] = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; otherwise runs/<time>-<model>.")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="After a failure go on from the last checkpoint, at most so often.")
    ] = 0,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Go on without hosts that are gone, under a new plan.")
    ] = False,
    launcher: options.Launcher = "auto",
    detach: options.Detach = False,
    profile_step: Annotated[
        int | None, typer.Option("--profile-step", metavar="N", help="Trace step N on every rank, for Perfetto.")
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Let replicas' counts follow measured speeds, and layers at checkpoints.")
    ] = False,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Start even if a check that the plan needs fails.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on a mixed cluster.

    Plans the topology (who does what, which groups are native, which bridged, and why), shows it, starts the
    ranks and reports. With nothing configured it trains a small Llama across an emulated NVIDIA + AMD pair on
    this machine, on the source text of Python's standard library, in about a minute.
    """
    from hetctl.runs import resolve, submit, supervise, train

    sink = Sink(as_json=as_json)
    if profile_step is not None:
        settings = [*(settings or ()), f"train.profile_step={profile_step}"]
    if adapt:
        settings = [*(settings or ()), "train.adapt=true"]
    if detach:
        from hetctl.runs.detach import detach as in_background

        sink.result(in_background(sys.argv[1:], run_dir, label=model or "run", sink=sink))
        return
    asked = resolve.read_recipe(
        recipe,
        settings=settings,
        model=model,
        global_batch=global_batch,
        seq_len=seq_len,
        split=split,
        alpha=alpha,
        bridge=bridge,
    )
    if plan_file is not None and emulate is not None:
        raise ConfigError("--plan already says where: leave out --emulate")
    prepared = train.prepare(
        asked,
        plan_file=plan_file,
        cluster_file=cluster,
        emulate=emulate,
        profile=profile,
        speed=speed,
        way=launcher,
        sink=sink,
    )
    train.show(prepared, sink)
    train.check(prepared, run_dir=run_dir, skip=skip_checks, sink=sink)
    if submit.outside_allocation(launcher):
        hosts = [h.name for h in prepared.launch.hosts]
        sink.result(submit.submit(sys.argv[1:], hosts, run_dir, label=prepared.plan.model, sink=sink))
        return
    summary = train.train(
        prepared,
        resume=resume,
        run_dir=run_dir,
        max_restarts=max_restarts,
        allow_missing=allow_missing,
        sink=sink,
    )
    sink.result(summary)
    supervise.raise_unless_done(summary)
