"""One attempt of a training run: from agents that wait to a verified end, with its summary written."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import write_json, write_yaml
from hetctl.comm.contract.plan import save_plan
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import OnFile
from hetctl.launcher.supervisor.agents import Agents, Site
from hetctl.launcher.supervisor.host_specs import Work, host_specs
from hetctl.launcher.supervisor.launch import given_up, say_unverified
from hetctl.launcher.supervisor.supervise import left_sentence, record_failure, supervise
from hetctl.launcher.supervisor.supervisor import RunOutcome
from hetctl.render.report import describe_islands, write_report
from hetctl.render.run import LiveRun, next_lines, summary_table
from hetctl.runs.follow import Follower
from hetctl.runs.prepare import Prepared
from hetctl.runs.resume import find_start, keep, resume_command, step_of
from hetctl.runs.summary import RunSummary
from hetctl.runs.verdict import saved_lines
from hetctl.trainer.adapt.pace import yardstick
from hetctl.trainer.adapt.resplit import with_layers
from hetctl.trainer.checkpoint.copy_targets import say_where_shards_live
from hetctl.trainer.checkpoint.resume import check_goes_on
from hetctl.trainer.job import Job
from hetctl.trainer.model.config import find_weights


class Attempt:
    """Agents of a run's hosts, and the checkpoint to begin from; `train` sees it through."""

    def __init__(
        self, prepared: Prepared, folder: RunFolder, agents: Agents, resume: str, sink: Sink, *, whole: Prepared
    ) -> None:
        """Nothing has started yet, and nothing of the folder has changed. Raises ConfigError.

        `whole` is the run as it was asked for, with the hosts that this attempt may be without.
        """
        self.prepared, self.folder, self.agents, self.sink, self.whole = prepared, folder, agents, sink, whole
        with given_up(agents):
            self.start = find_start(resume, agents)
            work = self._work()
            if self.start is not None:
                start = folder.checkpoints / self.start
                recorded = folder.recipe if start.parent == folder.checkpoints and folder.recipe.is_file() else None
                check_goes_on(
                    prepared.recipe, prepared.shape, start, base=prepared.base, recorded=recorded, warn=sink.warn
                )
            say_where_shards_live(
                prepared.recipe.checkpoint.store,
                [r.host for r in prepared.plan.ranks],
                folder.path,
                spread=agents.spread,
                over=prepared.plan.over_replicas,
                console=sink,
            )
            say_unverified(prepared.launch, sink)
            if self.start is not None:
                sink.say(f"continuing from {_place(self.start)}")
            self.specs = host_specs(agents, prepared.launch, work, run=folder.identity)
            self._record()

    def train(self, place: OnFile) -> tuple[RunSummary, RunOutcome, Follower]:
        """Run the ranks to their end, and say what came of it. Raises WorkFailed where hosts do not get ready."""
        prepared, folder = self.prepared, self.folder
        against = yardstick(prepared.plan, prepared.cluster.digest)
        with LiveRun(self.sink, prepared.recipe.train.steps, paces=not prepared.shares_cores) as live:
            follower = Follower(folder, live, encode(prepared.recipe), against)
            outcome = supervise(self.agents, self.specs, follower.take, place=place, say=live.note)
            follower.writers.end(encode(follower.ended) if follower.ended else {})
        return self._summary(outcome, follower), outcome, follower

    def _work(self) -> Work:
        """What each host's ranks run: the trainer, on this job."""
        prepared = self.prepared
        weights = find_weights(prepared.recipe.model.name)

        @cache  # of 10,000 ranks it is megabytes, and the same for all hosts whose data lie alike
        def job(moved: tuple[tuple[str, str], ...]) -> str:
            return Job(
                prepared.plan,
                prepared.recipe.with_paths(dict(moved)),
                prepared.shape,
                "checkpoints",
                str("checkpoints" / self.start) if self.start else None,
                weights=str(weights) if weights else None,
                base=prepared.base,
                timeout_s=prepared.recipe.train.timeout_s,
            ).to_json()

        def files(site: Site) -> dict[str, str]:
            return {variables.JOB: job(tuple(sorted(site.moved.items())))}

        return Work(("python", "-m", "hetctl.trainer"), files, goes_on=self.start is not None)

    def _record(self) -> None:
        """Write what stays with the launcher; a run anew has no figures yet."""
        keep(self.whole, self.folder)
        save_plan(self.folder.plan, self.prepared.plan)
        write_json(self.folder.predicted, encode(self.prepared.predicted))
        header = "The recipe as it was run, every key resolved."
        write_yaml(self.folder.recipe, self.prepared.recipe, header=header)
        if self.start is None:
            self.folder.metrics.unlink(missing_ok=True)

    def _summary(self, outcome: RunOutcome, follower: Follower) -> RunSummary:
        prepared, folder, ended = self.prepared, self.folder, follower.ended
        failure = record_failure(folder, outcome, [r.host for r in prepared.plan.ranks], self.agents.sites)
        by_a_rank = ended is not None and ended.interrupted and not outcome.ended_early  # that somebody told to end
        interrupted = outcome.interrupted or (by_a_rank and failure is None)
        status = "interrupted" if interrupted else "failed" if failure or not ended else "done"
        if status == "done" and outcome.ended_early:
            status = "saved"  # USR2: asked to save and end
        why = failure or {"reason": None, "error_type": None, "hint": None}
        if failure is None and status == "failed":
            why["reason"] = "the ranks ended without a summary"
        moved = ended.recut if ended else ()  # layers, by --adapt: the islands are described as the run ended
        plan = with_layers(prepared.plan, moved[-1]["after"]) if moved else prepared.plan
        reached = folder.progress()  # of the whole run: the ranks know their own attempt only
        return RunSummary(
            run=folder.name,
            status=status,
            model=prepared.plan.model,
            parameters=prepared.shape.parameters,
            steps_planned=prepared.recipe.train.steps,
            # none were made past a finished run's checkpoint
            **reached | ({"steps": ended.steps} if ended else {}),
            islands=describe_islands(plan, ended.island_shares, ended.memory_bytes)
            if ended
            else describe_islands(plan),
            emulated=prepared.cluster.source == "emulated",
            shares_cores=prepared.shares_cores,
            run_dir=str(folder.path),
            wall_s=None,
            processes_left=outcome.left,
            links=outcome.links,
            **follower.against.verdict(ended.tokens_per_s if ended else None),
            ended=ended,
            bridges=follower.engines,
            signal=outcome.signal or (signal.SIGTERM if by_a_rank else None),
            **self._way_on(follower, done=status == "done"),
            failure=why["reason"],
            error_type=why["error_type"],
            failure_hint=why["hint"],
        )

    def _way_on(self, follower: Follower, *, done: bool) -> dict[str, Any]:
        """The step of the newest checkpoint, and the command that goes on from there."""
        step, elsewhere = follower.saved, None
        if step is None and self.start is not None:
            step = step_of(self.start)
            elsewhere = (
                self.start if self.start.is_absolute() and self.start.parent != self.folder.checkpoints else None
            )
        return {"checkpoint_step": step, "resume": None if done else resume_command(self.folder, elsewhere)}


def write_end(summary: RunSummary, folder: RunFolder, sink: Sink) -> None:
    """The page and, at last, summary.json; on a full disk what the run came to is said all the same."""
    timeline = encode(summary.ended.timeline) if summary.ended else []
    try:
        write_json(folder.timeline, timeline)
        write_report(folder, {**summary.document(), "timeline": timeline})
    except (OSError, ConfigError) as error:
        sink.warn(f"the run's report is not whole: {error}")
    try:
        folder.write_summary(summary.document())
    except OSError as error:
        sink.warn(f"the run's summary is not whole: {error}")


def show_end(summary: RunSummary, outcome: RunOutcome, folder: RunFolder, sink: Sink) -> None:
    """What the run came to, for people."""
    sink.say(summary_table(summary.document()))
    sink.say(f"report: {folder.report}; {left_sentence(outcome)}")
    for line in next_lines(summary.document()):
        sink.say(line)
    if summary.status == "saved":  # of what is an error, the error's block says it
        for line in saved_lines(summary.document()):
            sink.say(line)


def _place(start: Path) -> str:
    """A checkpoint to go on from, for people."""
    step = step_of(start)
    return str(start) if step is None else f"step {step}"
