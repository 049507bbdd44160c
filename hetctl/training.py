"""From a prepared plan to a finished run: folder, files for the ranks, supervision, summary."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl import planning
from hetctl.comm.cluster import Cluster
from hetctl.comm.errors import ConfigError
from hetctl.comm.files import write_atomically, write_yaml
from hetctl.comm.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.plan import Plan, load_plan, save_plan
from hetctl.comm.values import encode
from hetctl.console import Sink
from hetctl.doctor.preflight import preflight, refuse_on_failures
from hetctl.launcher.environment import PlannedPlace, Seat, device_type, placement_of
from hetctl.launcher.runfolder import RunFolder, create_run
from hetctl.launcher.supervisor import Event, HostSpec, Outcome
from hetctl.launcher.workers import local_host
from hetctl.render.plan import show_plan
from hetctl.render.report import write_report
from hetctl.render.run import LiveRun, failure_lines, summary_table
from hetctl.supervising import record_failure, supervise
from hetctl.trainer import checkpoints
from hetctl.trainer.data.sources import source_files
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.executable import check_executable, check_trainable
from hetctl.trainer.job import VARIABLE as JOB_VARIABLE
from hetctl.trainer.job import Job
from hetctl.trainer.planner import EXECUTABLE, make_plan
from hetctl.trainer.recipe import Recipe
from hetctl.trainer.shapes import ModelShape
from hetctl.trainer.weights import find_weights
from hetctl.where import find_running_cluster


@dataclass(frozen=True)
class Prepared:
    """A run that could start: everything checked, nothing written."""

    recipe: Recipe
    shape: ModelShape
    cluster: Cluster
    plan: Plan


def prepare(
    recipe: Recipe,
    *,
    plan_file: Path | None,
    cluster_file: Path | None,
    emulate: str | None,
    profile: Path | None,
    speed: str | None,
    sink: Sink,
) -> Prepared:
    """Find the cluster, make or load the plan, check the data. Raises ConfigError or Infeasible; writes nothing."""
    shape = recipe.shape()
    check_trainable(shape)
    wanted = load_plan(plan_file, layers=shape.layers) if plan_file else None
    cluster = find_running_cluster(cluster_file, emulate, plan=wanted, sink=sink)
    if wanted is not None:
        plan = _checked_plan(wanted, cluster, recipe, sink)
    else:
        speeds, measured = planning.read_speeds(speed), planning.read_profile(profile)
        plan = make_plan(cluster, recipe, speeds=speeds, profile=measured, abilities=EXECUTABLE)
    check_data(recipe, sink)
    if weights := find_weights(recipe.model.name):
        from hetctl.trainer.huggingface import check_weights

        check_weights(weights)
        sink.say(f"fine-tuning the weights in {weights}")
    return Prepared(recipe, shape, cluster, plan)


def _checked_plan(plan: Plan, cluster: Cluster, recipe: Recipe, sink: Sink) -> Plan:
    """A person's plan file, if this cluster and recipe can run it. Raises ConfigError."""
    if plan.seq_len != recipe.model.seq_len or plan.global_batch != recipe.batch.global_batch:
        raise ConfigError(
            f"the plan is for {plan.global_batch} samples of {plan.seq_len} tokens, the recipe asks for "
            f"{recipe.batch.global_batch} of {recipe.model.seq_len}",
            hint="make the plan anew, or set batch.global_batch and model.seq_len to the plan's",
        )
    check_executable(plan)
    if plan.cluster_digest != cluster.digest:
        sink.warn("the plan was made for another cluster (its digest differs); its ranks fit, so it is used")
    return plan


def show(prepared: Prepared, sink: Sink) -> None:
    """The plan for people, before anything starts."""
    show_plan(sink, prepared.plan)


def check(prepared: Prepared, *, run_dir: Path | None, skip: bool, sink: Sink) -> None:
    """The quick checks that the plan needs. Raises WorkFailed on failures unless told to `skip` them."""
    folder = RunFolder(run_dir).checkpoints if run_dir else Path("runs").absolute()
    findings = preflight(prepared.plan, prepared.cluster, folder=folder)
    for finding in findings:
        if finding.state == "fail" and skip:
            sink.warn(f"{finding.host}: {finding.check}: {finding.reason}; started all the same (--skip-checks)")
    if not skip:
        refuse_on_failures(findings)


def check_data(recipe: Recipe, sink: Sink) -> None:
    """Raise ConfigError unless the data is there, can be tokenised, and fits the model."""
    source_files(recipe.data)
    sink.say(f"data: {recipe.data.source}, tokenizer {recipe.data.tokenizer}")
    tokens = open_tokens(recipe.data)
    vocabulary = recipe.shape().vocab
    if tokens.vocabulary > vocabulary:
        raise ConfigError(
            f"the tokenizer has {tokens.vocabulary} tokens, the model's vocabulary holds {vocabulary}",
            hint="take the model's own tokenizer, or a model with a larger vocabulary",
        )
    for side in (tokens.train, tokens.validation):
        if len(side) <= recipe.model.seq_len:
            raise ConfigError(
                f"'{recipe.data.source}' gives {len(tokens.train)} tokens to train and {len(tokens.validation)} to "
                f"validate on, too few for samples of {recipe.model.seq_len}",
                hint="use more text, a larger data.validation_share, or a smaller model.seq_len",
            )


def train(prepared: Prepared, *, resume: str, run_dir: Path | None, sink: Sink) -> dict[str, Any]:
    """Run it. Returns the summary that is also in the run's summary.json, whatever the end was."""
    began = time.monotonic()
    checkpoint = _checkpoint(resume, run_dir)
    folder = create_run(run_dir, prepared.plan.model)
    hosts = _write_run_files(prepared, folder, checkpoint)
    steps = prepared.recipe.train.steps
    found: dict[str, Any] = {}
    with LiveRun(sink, steps) as live:
        outcome = _supervise(hosts, folder, live, found)
    summary = _summary(prepared, folder, outcome, found, wall_s=time.monotonic() - began)
    folder.write_summary({k: v for k, v in summary.items() if k != "timeline"})
    write_report(folder, prepared.plan, summary)
    summary.pop("timeline", None)
    _show_end(summary, outcome, folder, sink)
    return summary


def _checkpoint(resume: str, run_dir: Path | None) -> str | None:
    """The checkpoint to continue from, as the ranks will load it. Raises ConfigError."""
    if resume == "never":
        return None
    if resume == "auto":
        newest = checkpoints.newest(RunFolder(run_dir.resolve()).checkpoints) if run_dir else None
        return str(newest) if newest else None
    path = Path(resume)
    if not checkpoints.is_whole(path):
        raise ConfigError(f"'{resume}' is not a checkpoint", hint="name a step-N folder of a run's checkpoints/")
    return str(path.resolve())


def _write_run_files(prepared: Prepared, folder: RunFolder, checkpoint: str | None) -> list[HostSpec]:
    plan, recipe, cluster = prepared.plan, prepared.recipe, prepared.cluster
    save_plan(folder.plan, plan)
    write_yaml(folder.recipe, encode(recipe), header="The recipe as it was run, every key resolved.")
    if checkpoint is None:
        folder.metrics.unlink(missing_ok=True)
    weights = find_weights(recipe.model.name)
    start = str(weights) if weights else None
    job = Job(plan, recipe, prepared.shape, str(folder.checkpoints), checkpoint, weights=start)
    islands = tuple(PlannedPlace(i.name, i.vendor, i.ranks) for i in plan.islands)
    seats = tuple(Seat(r.rank, r.host, r.device) for r in plan.ranks)
    placement = placement_of(islands, plan.bridges, seats, runs=cluster.runs, verify_bridge=recipe.bridge.verify)
    files = {JOB_VARIABLE: folder.launch / "job.json", PLACEMENT_VARIABLE: folder.launch / "placement.json"}
    write_atomically(files[JOB_VARIABLE], job.to_json())
    write_atomically(files[PLACEMENT_VARIABLE], placement.to_json())
    argv = (sys.executable, "-m", "hetctl.trainer")
    return [local_host(seats, argv, folder, files=files, device_type=device_type(cluster.runs))]


def _supervise(hosts: list[HostSpec], folder: RunFolder, live: LiveRun, found: dict[str, Any]) -> Outcome:
    def on_event(event: Event) -> None:
        kind = event["event"]
        record = {k: v for k, v in event.items() if k not in ("event", "rank", "host")}
        if kind == "begin":
            live.begin(event["step"])
        elif kind == "step":
            folder.append_metrics(record)
            live.step(record)
        elif kind == "summary":
            found.update(record)

    return supervise(hosts, on_event, say=live.note)


def _summary(
    prepared: Prepared, folder: RunFolder, outcome: Outcome, found: dict[str, Any], *, wall_s: float
) -> dict[str, Any]:
    metrics = folder.read_metrics()
    failure = None if outcome.interrupted else record_failure(folder, outcome, [r.host for r in prepared.plan.ranks])
    status = "interrupted" if outcome.interrupted else "failed" if failure or not found else "done"
    shares = found.pop("shares", {})
    summary: dict[str, Any] = {
        "run": folder.name,
        "status": status,
        "model": prepared.plan.model,
        "parameters": prepared.shape.parameters,
        "steps_planned": prepared.recipe.train.steps,
        "steps": metrics[-1]["step"] if metrics else 0,
        "first_loss": metrics[0]["loss"] if metrics else None,
        "last_loss": metrics[-1]["loss"] if metrics else None,
        "tokens": sum(m["tokens"] for m in metrics),
        **found,
        "bubble_share": shares.get("bubble"),
        "bridge_share": shares.get("bridge"),
        "shares": shares,
        "islands": _islands(prepared.plan),
        "emulated": prepared.cluster.source == "emulated",
        "wall_s": wall_s,
        "run_dir": str(folder.path),
        "processes_left": outcome.left,
    }
    if status == "failed":
        summary["failure"] = failure["reason"] if failure else "the ranks ended without a summary"
    return summary


def _islands(plan: Plan) -> list[dict[str, Any]]:
    """Each island with its ranks and the layers it holds."""
    described = []
    for island in plan.islands:
        spans = [s.layers for r in plan.replicas for s in r.stages if set(s.ranks) & set(island.ranks)]
        described.append(
            {
                "name": island.name,
                "vendor": island.vendor,
                "ranks": list(island.ranks),
                "layers": sorted({tuple(span) for span in spans}),
            }
        )
    return described


def _show_end(summary: dict[str, Any], outcome: Outcome, folder: RunFolder, sink: Sink) -> None:
    if summary["status"] == "failed" and folder.failure.is_file():
        for line in failure_lines(json.loads(folder.failure.read_text())):
            sink.errors.print(line, highlight=False, markup=False, soft_wrap=True)
    sink.say(summary_table(summary))
    left = "nothing of the run is left running" if outcome.left == 0 else f"{outcome.left} processes are left"
    sink.say(f"{left}; report: {folder.report}")
