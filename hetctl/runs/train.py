"""From a prepared plan to a finished run: folder, files for the ranks, supervision, summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetctl.runs import resolve
from hetctl.runs.restarts import Restarts, unreachable_hosts, without
from hetctl.runs.metrics_writers import MetricsWriters
from hetctl.comm.contract.cluster import Cluster, Member
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.files import read_yaml, write_atomically, write_json, write_yaml
from hetctl.comm.contract.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.contract.plan import Plan, load_plan, save_plan
from hetctl.comm.contract.units import show_bytes
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.doctor.preflight import preflight, refuse_on_failures
from hetctl.runs.inputs import check_data, check_start, say_data
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.environment import PlannedPlace, Seat, device_type, placement_of
from hetctl.launcher.supervisor.agent_link import Event
from hetctl.launcher.run_folder.registry import delist
from hetctl.launcher.run_folder.folder import RunFolder, create_run
from hetctl.launcher.supervisor.site import Site
from hetctl.launcher.supervisor.supervisor import HostSpec, RunOutcome
from hetctl.launcher.supervisor.host_specs import host_specs
from hetctl.runs.launch import Launch, start_agents_on, choose_way, say_unverified, store_ports
from hetctl.render.plan import show_plan
from hetctl.render.report import describe_islands, write_report
from hetctl.render.run import LiveRun, failure_lines, show_number, summary_table
from hetctl.runs.supervise import left_sentence, record_failure, supervise
from hetctl.trainer.planning.executable import check_executable, check_trainable
from hetctl.trainer.job import VARIABLE as JOB_VARIABLE
from hetctl.trainer.job import Job
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.weights import find_weights
from hetctl.trainer.adapt.pace import Yardstick, yardstick
from hetctl.trainer.planning.planner import EXECUTABLE, make_plan
from hetctl.trainer.recipe import Recipe, load_recipe
from hetctl.trainer.adapt.resplit import with_layers
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.copy_targets import targets_of
from hetctl.runs.where import find_running_cluster

ORDER_OF_SAMPLES = (  # a run goes on at sample step x global_batch of the order that these make
    ("data", "source"),
    ("data", "tokenizer"),
    ("data", "field"),
    ("data", "seed"),
    ("data", "validation_share"),
    ("model", "seq_len"),
    ("batch", "global_batch"),
)
BRIDGES = "bridges"  # what the engines of direct bridges say of each rank's transfers


@dataclass(frozen=True)
class Prepared:
    """A run that could start: everything checked, nothing written."""

    recipe: Recipe
    shape: ModelShape
    cluster: Cluster
    plan: Plan
    way: str = "auto"  # how hosts are entered
    replan: Callable[[Cluster], Plan] | None = None  # None: a person's plan file, which says who takes part

    @property
    def yardstick(self) -> Yardstick:
        """What the run's tokens/s are held against."""
        return yardstick(self.plan, self.cluster.digest)

    @property
    def launch(self) -> Launch:
        return Launch(self.cluster, tuple(_seats(self.plan, self.cluster)), way=choose_way(self.way))


def prepare(
    recipe: Recipe,
    *,
    plan_file: Path | None,
    cluster_file: Path | None,
    emulate: str | None,
    profile: Path | None,
    speed: str | None,
    way: str = "auto",
    sink: Sink,
) -> Prepared:
    """Find the cluster, make or load the plan, check the data. Raises ConfigError or Infeasible; writes nothing."""
    shape = recipe.shape()
    check_trainable(shape)
    wanted = load_plan(plan_file, layers=shape.layers) if plan_file else None
    cluster = find_running_cluster(cluster_file, emulate, plan=wanted, sink=sink)
    if wanted is not None:
        prepared = Prepared(recipe, shape, cluster, _checked_plan(wanted, cluster, recipe, sink), way)
    else:
        speeds, measured = resolve.read_speeds(speed), resolve.read_profile(profile)
        replan = partial(make_plan, recipe=recipe, speeds=speeds, profile=measured, abilities=EXECUTABLE)
        prepared = Prepared(recipe, shape, cluster, replan(cluster), way, replan)
    say_data(recipe, sink)
    if prepared.launch.here:
        check_data(recipe)
    check_start(recipe, shape, sink)
    return prepared


def _checked_plan(plan: Plan, cluster: Cluster, recipe: Recipe, sink: Sink) -> Plan:
    """A person's plan file, if this cluster and recipe can run it. Raises ConfigError."""
    if plan.seq_len != recipe.model.seq_len or plan.global_batch != recipe.batch.global_batch:
        raise ConfigError(
            f"the plan is for {plan.global_batch} samples of {plan.seq_len} tokens, the recipe asks for "
            f"{recipe.batch.global_batch} of {recipe.model.seq_len}",
            hint="make the plan anew, or set batch.global_batch and model.seq_len to the plan's",
        )
    check_executable(plan, compiled=recipe.train.compile)
    check_trainable(recipe.shape(), plan)
    if plan.cluster_digest != cluster.digest:
        sink.warn("the plan was made for another cluster (its digest differs); its ranks fit, so it is used")
        return _held_to(plan, cluster, sink)
    return plan


def _held_to(plan: Plan, cluster: Cluster, sink: Sink) -> Plan:
    """The plan, each rank held to the memory of its device here, which may be a share of one."""
    rooms = {s.rank: cluster.device(Member(s.host, s.device)).memory_bytes for s in _seats(plan, cluster)}
    for rank, needed in enumerate(plan.predicted.memory_bytes if plan.predicted else ()):
        room = rooms.get(rank)
        if room is not None and needed > room:
            sink.warn(f"rank {rank} is predicted to need {show_bytes(needed)}, its device here has {show_bytes(room)}")
    caps = {r.rank: min(filter(None, (r.memory_bytes, rooms.get(r.rank))), default=None) for r in plan.ranks}
    return replace(plan, ranks=tuple(replace(r, memory_bytes=caps[r.rank]) for r in plan.ranks))


def _seats(plan: Plan, cluster: Cluster) -> list[Seat]:
    """Where the plan's ranks run: on the hosts that it names, else on those that stand for them."""
    seats = [Seat(r.rank, r.host, r.device) for r in plan.ranks]
    if cluster.source == "emulated" and any(s.host not in cluster.host_by_name for s in seats):
        return _stand_ins(plan, cluster)
    return seats


def _stand_ins(plan: Plan, cluster: Cluster) -> list[Seat]:
    """The plan names hosts that are not here: their ranks sit on this machine's devices, island by island."""
    ranks = [rank for island in plan.islands for rank in island.ranks]
    members = [member for island in cluster.islands for member in island.members]
    return sorted((Seat(r, m.host, m.device) for r, m in zip(ranks, members, strict=True)), key=lambda seat: seat.rank)


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


def train(
    prepared: Prepared,
    *,
    resume: str,
    run_dir: Path | None,
    sink: Sink,
    max_restarts: int = 0,
    allow_missing: bool = False,
) -> dict[str, Any]:
    """Run it, again after failures where that was asked for. Returns what is also in the run's summary.json."""
    began = time.monotonic()
    _check_resume(resume)
    folder = create_run(run_dir, prepared.plan.model)
    attempts = Restarts(max_restarts, allow_missing)
    while True:
        prepared, agents = _board(prepared, folder, attempts, resume, sink)
        summary, outcome = _attempt(prepared, folder, agents, attempts, resume, sink, began)
        why_not = attempts.why_not_again(summary.get("error_type")) if summary["status"] == "failed" else ""
        if why_not is None:
            attempts.used += 1
            resume = "auto" if attempts.saved else resume
            prepared = _remaining(prepared, dict.fromkeys(outcome.lost, "it stopped answering"), attempts, sink)
            sink.warn(f"restart {attempts.used} of {max_restarts} after: {summary['failure']}")
            continue
        if why_not:
            sink.warn(f"no further restart: {why_not}")
        return summary


def _board(prepared: Prepared, folder: RunFolder, attempts: Restarts, resume: str, sink: Sink) -> tuple[Prepared, Agents]:
    """Agents on all hosts; where it is allowed, on those that can be reached, under a plan for them."""
    while True:
        try:
            return prepared, start_agents_on(prepared.launch, folder, paths=_paths(prepared, resume), sink=sink)
        except HetctlError as error:
            gone = unreachable_hosts(error, [h.name for h in prepared.launch.hosts]) if attempts.allow_missing else {}
            if not gone:
                raise
            prepared = _remaining(prepared, gone, attempts, sink)


def _remaining(prepared: Prepared, gone: dict[str, str], attempts: Restarts, sink: Sink) -> Prepared:
    """The run on the hosts that remain, planned anew; as it was when nothing is gone or that is not allowed."""
    if not gone or not attempts.allow_missing:
        return prepared
    if prepared.replan is None:
        raise ConfigError("a plan file says which hosts take part", hint="leave out --plan to go on without some")
    for host, why in gone.items():
        sink.warn(f"going on without {host}: {why}")
    attempts.missing |= gone
    cluster = without(prepared.cluster, gone)
    left = replace(prepared, cluster=cluster, plan=prepared.replan(cluster))
    keep = prepared.recipe.checkpoint
    if keep.store.removeprefix("gather:") in gone:
        sink.warn(f"checkpoint.store={keep.store} ends with its host: it is auto from now on")
        left = replace(left, recipe=replace(left.recipe, checkpoint=replace(keep, store="auto")))
    show(left, sink)
    return left


def _kept_twice(prepared: Prepared, agents: Agents, attempts: Restarts, sink: Sink) -> Prepared:
    """Where any host may go missing, `checkpoint.store=auto` keeps the shards of each on another one too."""
    keep = prepared.recipe.checkpoint
    if keep.store != "auto" or not agents.spread or not attempts.allow_missing or len(agents.sites) < 2:
        return prepared
    sink.say("--allow-missing: checkpoint.store=auto is replicate:2 on hosts that share no folder")
    return replace(prepared, recipe=replace(prepared.recipe, checkpoint=replace(keep, store="replicate:2")))


def _attempt(
    prepared: Prepared,
    folder: RunFolder,
    agents: Agents,
    attempts: Restarts,
    resume: str,
    sink: Sink,
    began: float,
) -> tuple[dict[str, Any], RunOutcome]:
    """One attempt from orders to verified end, with its summary written."""
    try:
        start = _checkpoint(resume, agents)
        attempts.began(start.name if start else None)
        if start is not None:
            _check_goes_on(prepared, folder, folder.checkpoints / start, sink)
        prepared = _kept_twice(prepared, agents, attempts, sink)
        specs = _specs(prepared, folder, agents, start, sink)
        _record(prepared, folder, anew=start is None)
    except BaseException:  # nothing has started
        agents.close()
        delist(folder.identity)
        raise
    found: dict[str, Any] = {}
    with LiveRun(sink, prepared.recipe.train.steps) as live:
        writers = MetricsWriters(folder, encode(prepared.recipe), live.note)
        tell = _on_event(folder, live, writers, found, prepared.yardstick)

        def on_event(event: Event) -> None:
            attempts.saved |= event["event"] == "saved"
            tell(event)

        outcome = supervise(agents, specs, on_event, folder=folder, say=live.note)
        writers.end(found)
    summary = _summary(prepared, folder, outcome, found, agents.sites, wall_s=time.monotonic() - began)
    summary |= {"restarts": attempts.used, "missing_hosts": attempts.missing}
    timeline = summary.pop("timeline", [])
    try:
        folder.write_summary(summary)
        write_json(folder.timeline, timeline)
        write_report(folder, prepared.plan, {**summary, "timeline": timeline})
    except OSError as error:  # a full disk, perhaps: what the run came to is said all the same
        sink.warn(f"the run's summary and report are not whole: {error}")
    _show_end(summary, outcome, folder, sink)
    return summary, outcome


def _check_resume(resume: str) -> None:
    if resume not in ("auto", "never") and not listing.is_whole(Path(resume)):
        raise ConfigError(f"'{resume}' is not a checkpoint", hint="name a step-N folder of a run's checkpoints/")


def _paths(prepared: Prepared, resume: str) -> list[str]:
    """What every host must be able to read: data, tokenizer, a checkpoint that was named."""
    data = prepared.recipe.data
    paths = [] if data.source == "python-stdlib" else [str(Path(data.source).resolve())]
    paths += [] if data.tokenizer == "bytes" else [str(Path(data.tokenizer).resolve())]
    return paths + ([] if resume in ("auto", "never") else [str(Path(resume).resolve())])


def _checkpoint(resume: str, agents: Agents) -> Path | None:
    """The checkpoint to continue from: a whole path, or the name that all hosts know it by."""
    if resume == "never":
        return None
    if resume != "auto":
        return Path(resume).resolve()
    if not agents.spread:
        newest = listing.newest(agents.sites[0].folder.checkpoints)
        return Path(newest.name) if newest else None
    held = [set(s.checkpoints) for s in agents.sites if s.checkpoints]  # one without any may get them from the others
    common = set.intersection(*held) if held else set()
    if held and not common:
        raise ConfigError(
            "the hosts' newest checkpoints are of different steps, and none is on all of them",
            hint="leave out a host that was away for long, or --resume never",
        )
    return Path(max(common)) if common else None


def _check_goes_on(prepared: Prepared, folder: RunFolder, start: Path, sink: Sink) -> None:
    """Raise ConfigError where the checkpoint to go on from is of another model; say where its data were others."""
    recorded = start.parent == folder.checkpoints and folder.recipe.is_file()
    if listing.is_whole(start):
        from hetctl.trainer.checkpoint.reader import Reader

        Reader(start).check_is_of(prepared.shape, whole=False)
    elif recorded:  # other hosts have it: their ranks look too
        _check_recorded(folder, prepared.shape)
    if not recorded:
        return
    before, now = read_yaml(folder.recipe, what="recipe"), encode(prepared.recipe)
    for section, key in ORDER_OF_SAMPLES:
        new = now[section][key]
        old = before[section].get(key, new)  # unchecked: it ran, by the rules of then
        if old != new and key == "tokenizer":
            raise ConfigError(
                f"data.tokenizer was {old} before the checkpoint and is {new} now: its weights know other tokens",
                hint=f"--set data.tokenizer={old} goes on, --resume never begins anew",
            )
        if old != new:
            sink.warn(f"{section}.{key} was {old} before the checkpoint and is {new} now: other samples follow on it")


def _check_recorded(folder: RunFolder, shape: ModelShape) -> None:
    """Raise ConfigError where the recipe that the run began with is of a model with other parameters."""
    from hetctl.trainer.model.model import shapes_of

    try:
        before = load_recipe(folder.recipe).shape()
    except HetctlError:  # by older rules, or its model's folder is gone
        return
    if shapes_of(before) != shapes_of(shape):
        raise ConfigError(
            f"what the run in {folder.path} saved is of another model than {shape.name}: {before.name}",
            hint="give each model a run folder of its own (--run-dir)",
        )


def _specs(prepared: Prepared, folder: RunFolder, agents: Agents, checkpoint: Path | None, sink: Sink) -> list[HostSpec]:
    """What each host's ranks are given. Raises ConfigError, and writes nothing."""
    plan, recipe, cluster = prepared.plan, prepared.recipe, prepared.cluster
    weights = find_weights(recipe.model.name)
    hosts = [r.host for r in plan.ranks]
    _say_where_shards_live(
        recipe.checkpoint.store, folder, hosts, spread=agents.spread, over=plan.over_replicas, sink=sink
    )
    islands = tuple(PlannedPlace(i.name, i.vendor, i.ranks) for i in plan.islands)
    seats = prepared.launch.seats
    say_unverified(plan.bridges, verify=recipe.bridge.verify, sink=sink)
    placement = placement_of(islands, plan.bridges, seats, runs=cluster.runs, verify_bridge=recipe.bridge.verify)

    def files(site: Site) -> dict[str, tuple[Path, str]]:
        start = str(site.folder.checkpoints / checkpoint) if checkpoint else None
        job = Job(
            plan,
            recipe,
            prepared.shape,
            str(site.folder.checkpoints),
            start,
            weights=str(weights) if weights else None,
            timeout_s=recipe.train.timeout_s,
        )
        return {
            JOB_VARIABLE: (site.folder.launch / "job.json", job.to_json()),
            PLACEMENT_VARIABLE: (site.folder.launch / "placement.json", placement.to_json()),
        }

    return host_specs(
        agents.sites,
        seats,
        ("python", "-m", "hetctl.trainer"),
        run=folder.identity,
        files=files,
        store_ports=store_ports(),
        device_type=device_type(cluster.runs, [i.vendor for i in plan.islands]),
        settings=prepared.launch.settings(),
        ports=prepared.launch.ports(plan.bridges),
        goes_on=checkpoint is not None,
        spread=agents.spread,
    )


def _record(prepared: Prepared, folder: RunFolder, *, anew: bool) -> None:
    """Write what stays with the launcher, once nothing refuses the attempt; a run anew has no figures yet."""
    save_plan(folder.plan, prepared.plan)
    write_yaml(folder.recipe, encode(prepared.recipe), header="The recipe as it was run, every key resolved.")
    if anew:
        folder.metrics.unlink(missing_ok=True)


def _say_where_shards_live(
    store: str, folder: RunFolder, hosts: Sequence[str], *, spread: bool, over: bool, sink: Sink
) -> None:
    """What `checkpoint.store` comes to on these hosts. Raises ConfigError where it cannot be."""
    if spread and store == "shared":
        raise ConfigError(
            f"checkpoint.store=shared: the hosts do not share {folder.path}",
            hint="give a folder that they share with --run-dir, or leave checkpoint.store=auto",
        )
    if spread and store == "auto":
        sink.warn(
            f"the hosts do not share {folder.path}: each keeps its shards of a checkpoint in its own run folder "
            "(checkpoint.store=replicate:2 keeps them on another one too)"
            + (", and replicas share out their state: without any one host no checkpoint is whole" if over else "")
        )
    elif store not in ("auto", "shared"):
        alone = len(set(hosts)) == 1
        if not any(targets_of(hosts, store)) or not spread:
            sink.warn(f"checkpoint.store={store} copies nothing: " + ("there is one host" if alone else "it is shared"))
        else:
            sink.say(f"the hosts do not share {folder.path}: checkpoint.store={store} copies shards between them")


def _on_event(
    folder: RunFolder, live: LiveRun, writers: MetricsWriters, found: dict[str, Any], against: Yardstick
) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        kind = event["event"]
        record = {k: v for k, v in event.items() if k not in ("event", "rank", "host", "n")}
        if kind == "step":
            record |= against.figures(record["tokens_per_s"])
        if kind == "begin":
            _check_text(folder, event, live.note)
            live.begin(event["step"])
            writers.begin(event["step"])
        elif kind == "step" and record.pop("late", False):  # of an attempt whose launcher was lost
            if record["step"] not in {m["step"] for m in folder.read_metrics()}:
                folder.append_metrics(record)
        elif kind == "step":
            folder.append_metrics(record)
            live.step(record)
            writers.step(record)
        elif kind == "validated":
            writers.validated(event["step"], event["validation_loss"])
            live.note(f"validation loss after step {event['step']}: {show_number(event['validation_loss'])}")
        elif kind == "summary":
            found.update(record)
        elif kind in ("rail", "note"):
            live.note(event["sentence"])
        elif kind == "bridge":
            found.setdefault(BRIDGES, []).append({"rank": event["rank"], **record})

    return on_event


def _check_text(folder: RunFolder, event: Event, say: Callable[[str], None]) -> None:
    """Keep the digest of the run's text; say where it changed before a checkpoint that the run goes on from."""
    text = event.get("text", "")
    if event["step"] and folder.text.is_file() and folder.text.read_text(encoding="utf-8") != text:
        say("note: the text is not what it was before the checkpoint: other samples follow on it")
    write_atomically(folder.text, text)


def _summary(
    prepared: Prepared,
    folder: RunFolder,
    outcome: RunOutcome,
    found: dict[str, Any],
    sites: Sequence[Site],
    *,
    wall_s: float,
) -> dict[str, Any]:
    hosts = [r.host for r in prepared.plan.ranks]
    failure = record_failure(folder, outcome, hosts, sites)
    told = found.keys() - {BRIDGES}
    status = "interrupted" if outcome.interrupted else "failed" if failure or not told else "done"
    if status == "done" and outcome.ended_early:
        status = "saved"  # USR2: asked to save and end
    shares, of_islands = found.pop("shares", {}), found.pop("island_shares", {})
    moved = found.get("recut")  # layers, by --adapt: the islands are described as the run ended
    plan = with_layers(prepared.plan, moved[-1]["after"]) if moved else prepared.plan
    summary: dict[str, Any] = {
        "run": folder.name,
        "status": status,
        "model": prepared.plan.model,
        "parameters": prepared.shape.parameters,
        "steps_planned": prepared.recipe.train.steps,
        **found,
        **_reached(folder, found),
        "bubble_share": shares.get("bubble"),
        "bridge_share": shares.get("bridge"),
        "shares": shares,
        **prepared.yardstick.verdict(found.get("tokens_per_s")),
        "islands": describe_islands(plan, of_islands, found.get("memory_bytes")),
        "emulated": prepared.cluster.source == "emulated",
        "wall_s": wall_s,
        "run_dir": str(folder.path),
        "processes_left": outcome.left,
        "links": outcome.links,
    }
    if outcome.interrupted:
        summary["signal"] = outcome.signal
    if status == "failed" or failure:
        summary["failure"] = failure["reason"] if failure else "the ranks ended without a summary"
        summary["error_type"] = failure["error_type"] if failure else None
        summary["failure_hint"] = failure["hint"] if failure else ""
    return summary


def _reached(folder: RunFolder, found: dict[str, Any]) -> dict[str, Any]:
    """Steps, losses and tokens of the whole run: its metrics know what earlier attempts did, the ranks only theirs."""
    reached = folder.progress()
    return reached | {"steps": found.get("steps", reached["steps"])}  # none were made past a finished run's checkpoint


def _show_end(summary: dict[str, Any], outcome: RunOutcome, folder: RunFolder, sink: Sink) -> None:
    if summary.get("failure") and folder.failure.is_file():
        for line in failure_lines(json.loads(folder.failure.read_text())):
            sink.errors.print(line, highlight=False, markup=False, soft_wrap=True)
    sink.say(summary_table(summary))
    sink.say(f"report: {folder.report}; {left_sentence(outcome)}")
