"""`hetctl train`: recipe and cluster to a plan, the plan to ranks, the ranks to a run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


@options.takes("recipe", "plan", *options.WHERE, *options.WHAT, *options.HOW)
def train(
    asked: options.RunOptions,
    resume: Annotated[
        str,
        typer.Option(help="auto continues the run in --run-dir; never starts anew; or a checkpoint's path."),
    ] = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; otherwise runs/<time>-<model>.")] = None,
    max_restarts: options.MaxRestarts = 0,
    allow_missing: options.AllowMissing = False,
    launcher: options.Launcher = "auto",
    detach: options.Detach = False,
    profile_step: Annotated[
        int | None, typer.Option("--profile-step", metavar="N", help="Trace step N on every rank, for Perfetto.")
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Let replicas' counts follow measured speeds, and layers at checkpoints.")
    ] = False,
    check_parity: Annotated[
        bool | None,
        typer.Option(help="Make the first steps in one process too; other losses are a failure. The demo does."),
    ] = None,
    skip_checks: options.SkipChecks = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on a mixed cluster.

    Plans the topology (who does what, which groups are native, which bridged, and why), shows it, starts the
    ranks and reports. With nothing configured it trains a small Llama across an emulated NVIDIA + AMD pair on
    this machine, on the source text of Python's standard library, in about a minute.
    """
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.commands.resolve import lead, resolve
    from hetctl.commands.start import Start, start
    from hetctl.runs.handover import outside_allocation
    from hetctl.runs.prepare import prepare
    from hetctl.runs.train import GoingOn

    sink = Sink(as_json=as_json)
    bare = replace(asked, settings=None) == options.RunOptions()
    more = [f"train.profile_step={profile_step}"] if profile_step is not None else []
    more += ["train.adapt=true"] if adapt else []
    asked = replace(asked, settings=[*(asked.settings or ()), *more])
    if launcher == "none":
        asked = lead(asked, sink)
    found = resolve(asked, sink, runs=True, trains=True)
    prepared = prepare(
        found.recipe,
        found.cluster,
        plan=found.plan,
        speeds=found.speeds,
        profile=found.profile,
        way=launcher,
        sink=sink,
    )
    comparable = resume in ("auto", "never") and not outside_allocation(launcher)
    if check_parity and not comparable:
        raise ConfigError(
            "--check-parity makes the first steps beforehand: not of a run from a checkpoint, nor of one for a queue"
        )
    if check_parity is None:
        check_parity = comparable and bare and found.recipe.model.name == "demo"
    how = GoingOn(resume, max_restarts, allow_missing)
    start(prepared, how, Start(run_dir, launcher, detach, skip_checks, dry_run, check_parity), sink)
