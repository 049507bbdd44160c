"""`hetctl resume`: a run goes on from its newest checkpoint, with what its folder says it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


@options.takes("cluster", "settings")
def resume(
    asked: options.RunOptions,
    run: options.MaybeRun = None,
    begin: Annotated[
        Path | None,
        typer.Option("--from", metavar="CHECKPOINT", help="Go on from this step-N folder, not the newest one."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="N|best", help="Go on from its checkpoint of that step, or of the lowest validation loss."
        ),
    ] = None,
    max_restarts: options.MaxRestarts = 0,
    allow_missing: options.AllowMissing = False,
    launcher: Annotated[
        str | None, typer.Option("--launcher", metavar="ssh|slurm|ray|local|none", help="Otherwise the run's own.")
    ] = None,
    detach: options.Detach = False,
    skip_checks: options.SkipChecks = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Go on with a run that was interrupted or failed, from its newest checkpoint (by default runs/latest).

    Its recipe, cluster and plan file are those it was started with, from its folder. What is given here
    (--set, --cluster) is changed, and the changes are shown.
    """
    from hetctl.comm.contract.cluster import load_cluster
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.commands.start import Start, start
    from hetctl.runs.manage import find_folder
    from hetctl.runs.prepare import prepare
    from hetctl.runs.resume import changes, kept, refuse_finished
    from hetctl.runs.train import GoingOn
    from hetctl.trainer.checkpoint import listing
    from hetctl.trainer.recipe import changed

    sink = Sink(as_json=as_json)
    folder = find_folder(run)
    before = kept(folder)
    if step is not None:
        if begin is not None:
            raise ConfigError("--from and --step both say where to go on", hint="leave one of them out")
        begin = listing.of_step(folder.checkpoints, step)
    recipe = changed(before.recipe, asked.overrides)
    cluster = load_cluster(asked.cluster) if asked.cluster else before.cluster
    refuse_finished(folder, recipe, from_newest=begin is None)
    how = GoingOn(str(begin) if begin else "auto", max_restarts, allow_missing)
    sink.say(f"resuming {folder.path}")
    for line in changes(before, recipe, cluster):
        sink.say(f"changed: {line}")
    prepared = prepare(
        recipe,
        cluster,
        plan=before.plan if before.fixed else None,
        speeds=before.speeds,
        profile=before.profile,
        way=launcher or before.way,
        sink=sink,
    )
    start(prepared, how, Start(folder.path, prepared.way, detach, skip_checks, dry_run), sink)
