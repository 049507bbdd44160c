"""What `train` and `resume` do with a run that could start: show it, check its hosts, then begin it, or hand it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetctl.console import Sink

if TYPE_CHECKING:
    from hetctl.runs.prepare import Prepared
    from hetctl.runs.train import GoingOn


@dataclass(frozen=True)
class Start:
    """What a command line says of the start itself."""

    run_dir: Path | None
    way: str  # of the command line: slurm, where nothing is allocated yet, submits
    detach: bool
    skip_checks: bool
    dry_run: bool
    check_parity: bool = False  # the first steps are made in one process too


def start(prepared: Prepared, how: GoingOn, asked: Start, sink: Sink) -> None:
    """Start it, or show what would start. Raises HetctlError, also for a run that does not end well."""
    from hetctl.comm.contract.values import encode
    from hetctl.doctor.preflight import check_before
    from hetctl.launcher.run_folder.folder import create_run
    from hetctl.render.plan import show_plan
    from hetctl.runs.handover import Handover, outside_allocation, run_in_background, submit, train_here
    from hetctl.runs.verdict import raise_unless_done

    show_plan(sink, prepared.plan, predicted=not prepared.shares_cores)
    check_before(prepared.plan, prepared.cluster, run_dir=asked.run_dir, skip=asked.skip_checks, say=sink.warn)
    if asked.dry_run:
        sink.say("dry run: no host was entered, nothing was written")
        sink.result({"status": "dry run", "recipe": encode(prepared.recipe), "plan": encode(prepared.plan)})
        return
    if asked.check_parity:
        how = replace(how, first_losses=_first_losses(prepared, sink))
    folder = create_run(asked.run_dir, prepared.plan.model)
    if asked.detach or outside_allocation(asked.way):
        hand_on = run_in_background if asked.detach else submit
        sink.result(hand_on(Handover(prepared, how), folder, sink))
        return
    summary = train_here(prepared, how, folder, sink)
    sink.result(summary)
    raise_unless_done(summary)


def _first_losses(prepared: Prepared, sink: Sink) -> tuple[float | None, ...]:
    """What the first losses are to be. Raises Infeasible where one device does not hold the model."""
    from hetctl.bench.parity import first_losses

    sink.say("first steps in one process, to compare the losses with")
    return first_losses(prepared.cluster, prepared.recipe, way=prepared.way, sink=sink)
