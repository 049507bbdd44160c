"""A training run: its folder, attempts until one ends well or none is left, and its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import OnFile, on_file
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.launch import held_hosts, start_agents_on
from hetctl.render.plan import show_plan
from hetctl.render.run import failure_lines, failure_sentence
from hetctl.runs.attempt import Attempt, show_end, write_end
from hetctl.runs.inputs import paths_to_read, shipments
from hetctl.runs.parity import held_against
from hetctl.runs.prepare import Prepared
from hetctl.runs.restarts import Restarts, unreachable_hosts, without
from hetctl.runs.resume import keep
from hetctl.runs.summary import RunSummary
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.planning.precision import precision_of


@dataclass(frozen=True)
class GoingOn:
    """What a command line says of how a run goes on: from where, and after which failures. Raises ConfigError."""

    resume: str = "auto"  # or never, or a checkpoint's path
    max_restarts: int = 0
    allow_missing: bool = False
    first_losses: tuple[float | None, ...] = ()  # of one process, that the run's are held against

    def __post_init__(self) -> None:
        if self.resume not in ("auto", "never") and not listing.is_whole(Path(self.resume)):
            hint = "name a step-N folder of a run's checkpoints/"
            raise ConfigError(f"'{self.resume}' is not a checkpoint", hint=hint)


def train(prepared: Prepared, folder: RunFolder, how: GoingOn, sink: Sink) -> RunSummary:
    """Run it, again after failures where that was asked for. It needs nobody who reads what it says."""
    with sink.outliving_readers(), held_hosts(prepared.launch, folder, sink), on_file(folder) as place:
        return _attempts(prepared, folder, how, place, sink)


def _attempts(prepared: Prepared, folder: RunFolder, how: GoingOn, place: OnFile, sink: Sink) -> RunSummary:
    """Attempts, until one ends well or none is left."""
    began = time.monotonic()
    restarts, resume, whole = Restarts(how.max_restarts, how.allow_missing), how.resume, prepared
    if not folder.recipe.is_file():  # a new folder: what does not even start can be begun again from it
        keep(whole, folder)
    gone: dict[str, str] = {}
    while True:
        prepared, agents = _start_agents(prepared, gone, place, restarts, resume, sink)
        prepared = _kept_twice(prepared, agents, restarts, sink)
        attempt = Attempt(prepared, folder, agents, resume, sink, whole=whole)
        restarts.began(attempt.start.name if attempt.start else None)
        summary, outcome, follower = attempt.train(place)
        restarts.saved |= follower.saved is not None
        summary = replace(
            summary, wall_s=time.monotonic() - began, restarts=restarts.used, missing_hosts=dict(restarts.missing)
        )
        if how.first_losses and summary.status == "done":
            precision = precision_of(prepared.cluster, prepared.recipe)
            losses = [m["loss"] for m in folder.read_metrics() if m["step"] <= len(how.first_losses)]
            summary = replace(summary, parity=held_against(losses, how.first_losses, precision))
        write_end(summary, folder, sink)
        show_end(summary, outcome, folder, sink)
        why_not = restarts.why_not_again(summary.error_type) if summary.status == "failed" else ""
        if why_not is not None:
            if why_not:
                sink.warn(f"no further restart: {why_not}")
            return summary
        restarts.used += 1
        resume = "auto" if restarts.saved else resume
        _show_failure(folder, sink)
        sink.warn(f"restart {restarts.used} of {how.max_restarts} after: {summary.failure}")
        gone = dict.fromkeys(outcome.lost, "it stopped answering")


def _show_failure(folder: RunFolder, sink: Sink) -> None:
    """Of an attempt that another one follows: that of the last one is the run's error."""
    if failure := folder.read_failure():
        for line in (failure_sentence(failure), *failure_lines(failure)):
            sink.errors.print(line, highlight=False, markup=False, soft_wrap=True)


def _start_agents(
    prepared: Prepared, gone: dict[str, str], place: OnFile, restarts: Restarts, resume: str, sink: Sink
) -> tuple[Prepared, Agents]:
    """Agents on all hosts; where it is allowed, without those that are gone, under a plan for the others."""
    paths, sent = paths_to_read(prepared.recipe, resume), shipments(prepared.recipe)
    while True:
        if gone and restarts.allow_missing:
            prepared = _without(prepared, gone, restarts, sink)
        try:
            return prepared, start_agents_on(prepared.launch, place, paths=paths, shipments=sent, console=sink)
        except HetctlError as error:
            gone = unreachable_hosts(error) if restarts.allow_missing else {}
            if not 0 < len(gone) < len(prepared.launch.hosts):
                raise


def _kept_twice(prepared: Prepared, agents: Agents, restarts: Restarts, sink: Sink) -> Prepared:
    """Where any host may go missing, `checkpoint.store=auto` keeps the shards of each on another one too."""
    if _store(prepared) != "auto" or not agents.spread or not restarts.allow_missing or len(agents.sites) < 2:
        return prepared
    sink.say("--allow-missing: checkpoint.store=auto is replicate:2 on hosts that share no folder")
    return prepared.kept_in("replicate:2")


def _without(prepared: Prepared, gone: dict[str, str], restarts: Restarts, sink: Sink) -> Prepared:
    """The run on the hosts that remain, planned anew. Raises Infeasible, and ConfigError where the plan is fixed."""
    if prepared.fixed:
        raise ConfigError("a plan file says which hosts take part", hint="leave out --plan to go on without some")
    for host, why in gone.items():
        sink.warn(f"going on without {host}: {why}")
    restarts.missing |= gone
    cluster = without(prepared.cluster, gone)
    left = prepared.planned_on(cluster)
    if _store(prepared).removeprefix("gather:") in gone:
        sink.warn(f"checkpoint.store={_store(prepared)} ends with its host: it is auto from now on")
        left = left.kept_in("auto")
    show_plan(sink, left.plan, predicted=not left.shares_cores)
    return left


def _store(prepared: Prepared) -> str:
    return prepared.recipe.checkpoint.store
