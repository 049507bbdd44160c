"""`hetctl bench pipeline`: plan one stage per island, start the ranks, collect what they measured."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agent_link import Event
from hetctl.launcher.supervisor.environment import PlannedPlace, Seat, Setting, device_type, placement_of
from hetctl.launcher.supervisor.host_specs import host_specs
from hetctl.runs import resolve
from hetctl.runs.launch import Launch, start_agents_on
from hetctl.runs.supervise import record_failure, supervise
from hetctl.runs.where import find_running_cluster
from hetctl.trainer.job import VARIABLE as JOB_VARIABLE
from hetctl.trainer.job import Job
from hetctl.trainer.planning.planner import EXECUTABLE, make_plan

ROUNDS_VARIABLE, NATIVE_VARIABLE = "HETCTL_BENCH_ROUNDS", "HETCTL_BENCH_NATIVE"
MEASURE_TIMEOUT_S = 600.0


def bench_pipeline(
    *,
    cluster_file: Path | None,
    emulate: str | None,
    model: str,
    seq_len: int | None,
    micro_batches: int,
    settings: Sequence[str],
    bridge: str | None,
    rounds: int,
    sink: Sink,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Tokens/s of one pipeline over native groups, the bridge and naive copies, in turn. Raises WorkFailed."""
    recipe = resolve.read_recipe(
        None,
        settings=[*settings, "batch.micro_batch_size=1", "parallelism.order=given"],
        model=model,
        seq_len=seq_len,
        global_batch=micro_batches,
        bridge=bridge,
    )
    cluster = find_running_cluster(cluster_file, emulate, sink=sink)
    recipe = replace(recipe, parallelism=replace(recipe.parallelism, pipeline=len(cluster.islands)))
    plan = make_plan(cluster, recipe, abilities=EXECUTABLE)
    layers = [f"{s.layers[1] - s.layers[0]} on {plan.ranks[s.ranks[0]].island}" for s in plan.replicas[0].stages]
    sink.say(f"{recipe.model.name}: layers {', '.join(layers)}; {micro_batches} micro-batches of {plan.seq_len} tokens")
    found: dict[str, Any] = {}

    def on_event(event: Event) -> None:
        if event["event"] == "round":
            sink.say(f"round {event['round']} of {event['rounds']}{' (warm-up)' if not event['round'] else ''}")
        elif event["event"] == "result":
            found.update(_figures(event))

    islands = tuple(PlannedPlace(i.name, i.vendor, i.ranks) for i in plan.islands)
    seats = tuple(Seat(r.rank, r.host, r.device) for r in plan.ranks)
    placement = placement_of(islands, plan.bridges, seats, runs=cluster.runs)

    def files(folder: RunFolder) -> dict[str, str]:
        job = Job(plan, recipe, recipe.shape(), str(folder.checkpoints), timeout_s=MEASURE_TIMEOUT_S)
        return {JOB_VARIABLE: job.to_json(), PLACEMENT_VARIABLE: placement.to_json()}

    kind = device_type(cluster.runs, [i.vendor for i in plan.islands])
    extra = {ROUNDS_VARIABLE: str(rounds)}
    if speak_alike(cluster):
        extra[NATIVE_VARIABLE] = "1"
    else:
        sink.say("no native library spans these islands: the bridge itself is the yardstick")
    program = Program("hetctl.trainer.bench.pipeline", files, kind, extra)
    run_ranks(program, Launch(cluster, seats), on_event, sink=sink, keep=keep)
    if not found:
        raise WorkFailed("the measurement ended without a result")
    transports = sorted({b.transport for b in plan.bridges})
    return {"model": recipe.model.name, "seq_len": plan.seq_len, "layers": layers, "transports": transports, **found}


def speak_alike(cluster: Cluster) -> bool:
    """Whether one native library serves all islands: they are emulated on devices of their own, or of one vendor."""
    if cluster.runs is not None:
        return not cluster.shares_devices
    return len({i.vendor for i in cluster.islands}) == 1


@dataclass(frozen=True)
class Program:
    """A module that runs on every rank: files it finds by variables (name -> content), and its environment."""

    module: str
    files: Callable[[RunFolder], Mapping[str, str]]
    device_type: str
    extra: Mapping[str, str] = field(default_factory=dict)


def run_ranks(
    program: Program, launch: Launch, on_event: Callable[[Event], None], *, sink: Sink, keep: Path | None = None
) -> None:
    """Run a measuring program on every seat, to its end; `keep` is a folder for its ranks' logs.

    Raises WorkFailed with the log's tail.
    """
    with tempfile.TemporaryDirectory(prefix="hetctl-bench-") as temporary, _kept(Path(temporary), keep):
        folder = RunFolder(Path(temporary))
        texts = {v: (f"file-{n}.json", text) for n, (v, text) in enumerate(program.files(folder).items())}
        own = [Setting(name, value, "of the measurement") for name, value in program.extra.items()]
        agents = start_agents_on(launch, folder, sink=sink)
        specs = host_specs(
            agents.sites,
            launch.seats,
            ("python", "-m", program.module),
            run=folder.identity,
            files=lambda site: {v: (site.folder.launch / name, text) for v, (name, text) in texts.items()},
            device_type=program.device_type,
            settings={name: (*settings, *own) for name, settings in launch.settings().items()},
        )
        outcome = supervise(agents, specs, on_event, folder=folder, say=sink.warn)
        failure = record_failure(folder, outcome, [s.host for s in launch.seats])
        if failure:
            tail = folder.log(failure["rank"]).read_text(errors="replace")[-1500:]
            raise WorkFailed(f"the measurement failed: {failure['reason']}", hint=tail)


@contextmanager
def _kept(folder: Path, keep: Path | None) -> Iterator[None]:
    """Copy the logs out of a run's folder before it goes, however the run ended."""
    try:
        yield
    finally:
        if keep is not None and (folder / "logs").is_dir():
            shutil.copytree(folder / "logs", keep, dirs_exist_ok=True)


def _figures(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("event", "rank", "host", "n")}


def pipeline_table(result: dict[str, Any]) -> Table:
    """Median, spread and ratio to the best native schedule, one row a variant."""
    table = Table("variant", "tokens/s (median)", "min - max", "of the best native (median, min - max)")
    for name, rates in result["tokens_per_s"].items():
        ratios = result["ratios"].get(name)
        shown = "the yardstick"
        if ratios:
            shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
        middle = f"{statistics.median(rates):,.0f}"
        table.add_row(name, middle, f"{min(rates):,.0f} - {max(rates):,.0f}", shown)
    return table
