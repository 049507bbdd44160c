"""From a prepared plan to a finished run: folder, files for the ranks, supervision, summary."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetctl import planning
from hetctl.comm.cluster import Cluster, load_cluster
from hetctl.comm.emulate import SpecIsland, SpecPart, label_machine, parse_spec
from hetctl.comm.errors import ConfigError, Interrupted, WorkFailed
from hetctl.comm.files import write_atomically, write_json, write_yaml
from hetctl.comm.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.plan import Plan, load_plan, save_plan
from hetctl.comm.values import encode
from hetctl.console import Sink
from hetctl.launcher.environment import HostShape, placement_of, rank_settings
from hetctl.launcher.failure import find_failure, read_rank_error
from hetctl.launcher.runfolder import RunFolder, create_run
from hetctl.launcher.supervisor import Event, HostSpec, Outcome, Supervisor
from hetctl.render.plan import show_plan
from hetctl.render.report import write_report
from hetctl.render.run import LiveRun, failure_lines, summary_table
from hetctl.thismachine import this_machine
from hetctl.trainer import checkpoints
from hetctl.trainer.data.sources import source_files
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.executable import check_executable
from hetctl.trainer.hardware import CLASSES
from hetctl.trainer.job import VARIABLE as JOB_VARIABLE
from hetctl.trainer.job import Job
from hetctl.trainer.planner import EXECUTABLE, make_plan
from hetctl.trainer.recipe import Recipe
from hetctl.trainer.shapes import ModelShape


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
    wanted = load_plan(plan_file, layers=shape.layers) if plan_file else None
    cluster = _find_cluster(cluster_file, emulate, wanted, sink)
    if wanted is not None:
        plan = _checked_plan(wanted, cluster, recipe, sink)
    else:
        speeds, measured = planning.read_speeds(speed), planning.read_profile(profile)
        plan = make_plan(cluster, recipe, speeds=speeds, profile=measured, abilities=EXECUTABLE)
    check_data(recipe, sink)
    return Prepared(recipe, shape, cluster, plan)


def _find_cluster(cluster_file: Path | None, emulate: str | None, plan: Plan | None, sink: Sink) -> Cluster:
    """The cluster to run on; an emulation labels this machine's devices, and says which."""
    if cluster_file is not None and emulate is not None:
        raise ConfigError("--cluster and --emulate exclude each other", hint="give one of them")
    here = Path("cluster.yaml")
    if cluster_file is None and emulate is None and plan is None and here.is_file():
        sink.warn("using ./cluster.yaml")
        cluster_file = here
    if cluster_file is not None:
        return _only_local(load_cluster(cluster_file))
    spec = _spec_of(plan) if plan else parse_spec(emulate or planning.DEFAULT_SPEC, CLASSES)
    machine, words = this_machine(sum(island.count for island in spec))
    sink.say(f"emulating {emulate or (plan_words(plan) if plan else planning.DEFAULT_SPEC)}: {words}")
    if machine.native == "gloo" and any(p.speed != 1 for i in spec for p in i.parts):
        sink.warn("on CPU an @SPEED weights the plan only: the processes run as fast as they can")
    return label_machine(spec, machine)


def _only_local(cluster: Cluster) -> Cluster:
    """Until ranks start over SSH, a cluster of other machines is refused rather than half run."""
    here = {socket.gethostname(), "localhost"}
    strangers = [h.name for h in cluster.hosts if h.name not in here and h.access is not None and not h.access.local]
    if strangers:
        raise ConfigError(
            f"this version starts ranks on this machine only; {strangers[0]} is another",
            hint="try the plan with --emulate, or `hetctl plan --cluster`",
        )
    return cluster


def _spec_of(plan: Plan) -> tuple[SpecIsland, ...]:
    """The emulation a plan file was made for: its islands' ranks, class by class."""
    islands = []
    for island in plan.islands:
        parts = tuple(SpecPart(plan.ranks[r].device_class, 1, plan.ranks[r].speed) for r in island.ranks)
        islands.append(SpecIsland(island.vendor, parts))
    return tuple(islands)


def plan_words(plan: Plan) -> str:
    """The plan's islands in a few words."""
    return ",".join(f"{i.name}:{len(i.ranks)}" for i in plan.islands)


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


def raise_unless_done(summary: dict[str, Any]) -> None:
    """The exit code of a run: failures 1, interruptions 130. Raises the matching HetctlError."""
    if summary["status"] == "interrupted":
        raise Interrupted("the run was interrupted", hint=f"continue with --run-dir {summary['run_dir']}")
    if summary["status"] == "failed":
        raise WorkFailed(f"the run failed: {summary['failure']}", hint=f"see {summary['run_dir']}/failure.json")


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
    job = Job(plan, recipe, prepared.shape, str(folder.checkpoints), checkpoint)
    placement = placement_of(plan, cluster.runs, verify_bridge=recipe.bridge.verify)
    files = {JOB_VARIABLE: folder.launch / "job.json", PLACEMENT_VARIABLE: folder.launch / "placement.json"}
    write_atomically(files[JOB_VARIABLE], job.to_json())
    write_atomically(files[PLACEMENT_VARIABLE], placement.to_json())
    return [_local_host(prepared, folder, files)]


def _local_host(prepared: Prepared, folder: RunFolder, files: dict[str, Path]) -> HostSpec:
    device_type = "cpu" if prepared.cluster.runs == "gloo" else "cuda"
    host = HostShape(prepared.plan.ranks[0].host, len(os.sched_getaffinity(0)), device_type, "127.0.0.1", "lo")
    workers = []
    for rank in prepared.plan.ranks:
        error_file = folder.error_file(rank.rank)
        error_file.unlink(missing_ok=True)
        settings = rank_settings(prepared.plan, rank, host, files={**files, "TORCHELASTIC_ERROR_FILE": error_file})
        workers.append(
            {
                "rank": rank.rank,
                "argv": [sys.executable, "-m", "hetctl.trainer"],
                "env": {s.name: s.value for s in settings},
                "log": str(folder.log(rank.rank)),
            }
        )
    return HostSpec(host.name, tuple(workers), store_address=host.master_address)


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

    supervisor = Supervisor(hosts, on_event)
    with _signals(supervisor, live):
        return supervisor.run()


@contextmanager
def _signals(supervisor: Supervisor, live: LiveRun) -> Iterator[None]:
    """Ctrl-C or TERM once: stop in order. Twice: at once."""

    def handler(*_: object) -> None:
        live.note("stopping: the ranks finish their step and save (again: at once)")
        supervisor.stop()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _summary(
    prepared: Prepared, folder: RunFolder, outcome: Outcome, found: dict[str, Any], *, wall_s: float
) -> dict[str, Any]:
    metrics = folder.read_metrics()
    failure = None if outcome.interrupted else _failure(prepared.plan, folder, outcome)
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


def _failure(plan: Plan, folder: RunFolder, outcome: Outcome) -> dict[str, Any] | None:
    errors = {r.rank: e for r in plan.ranks if (e := read_rank_error(folder.error_file(r.rank)))}
    failure = find_failure(outcome.exits, [r.host for r in plan.ranks], errors)
    if failure is None:
        folder.failure.unlink(missing_ok=True)
        return None
    record = {**asdict(failure), "log": str(folder.log(failure.rank))}
    write_json(folder.failure, record)
    return record


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
