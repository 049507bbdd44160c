"""`hetctl run`: a program's ranks on a cluster's islands, their output as it comes, and how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster, Member
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.events import EngineAccount, Told, present
from hetctl.comm.contract.plan import Plan, PlannedBridge
from hetctl.console import Sink
from hetctl.launcher.engines.entrance import choose_way
from hetctl.launcher.hosts.folder_files import FolderFiles, files_of_folder
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.logs import Follower
from hetctl.launcher.run_folder.registry import OnFile, on_file
from hetctl.launcher.supervisor.environment import Setting
from hetctl.launcher.supervisor.host_specs import Work, host_specs
from hetctl.launcher.supervisor.launch import Launch, given_up, held_hosts, say_unverified, start_agents_on
from hetctl.launcher.supervisor.supervise import left_sentence, record_failure, supervise
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.trainer.planning.pools import read_pools, seats
from hetctl.trainer.planning.precision import precision_of
from hetctl.trainer.recipe import Recipe


@dataclass(frozen=True)
class ProgramRun:
    """A program to run, and where: a plan's ranks and bridges, or all devices of a cluster."""

    program: tuple[str, ...]
    cluster: Cluster
    plan: Plan | None = None
    bridge: str = "auto"
    as_nccl: bool = False
    verify_bridge: bool = False
    way: str = "auto"

    def __post_init__(self) -> None:
        """A script is started by each host's own python, which has torch; one that starts itself is left to do so."""
        first = self.program[0] if self.program else ""
        starts_itself = "/" in first and os.access(first, os.X_OK)
        if first.endswith(".py") and Path(first).is_file() and not starts_itself:
            object.__setattr__(self, "program", ("python", *self.program))

    @property
    def label(self) -> str:
        return Path(self.program[-1] if len(self.program) == 2 else self.program[min(1, len(self.program) - 1)]).stem

    @cached_property
    def launch(self) -> Launch:
        """Raises ConfigError where a bridge that was asked for cannot be."""
        bridges = None if self.plan else _bridges(self.cluster, self.bridge)
        way = choose_way(self.way, self.cluster.hosts)
        return Launch.of(self.cluster, self.plan, bridges=bridges, way=way, verify_bridge=self.verify_bridge)

    @cached_property
    def script(self) -> Path | None:
        """The first word after `python` that is a file here: its folder travels to hosts that cannot see it."""
        words = self.program[Path(self.program[0]).name.startswith("python") :]
        return None if self.launch.here else next((Path(word) for word in words if Path(word).is_file()), None)

    @cached_property
    def sent(self) -> FolderFiles | None:
        """What of a person's files goes to the hosts. Raises ConfigError where it is too much."""
        if self.script is None:
            return None
        chosen = files_of_folder(self.script.absolute().parent)
        if self.script.name not in chosen.files:
            hint = f"write !{self.script.name} into {chosen.folder / '.hetctlignore'}"
            raise ConfigError(f"{self.script} does not travel: it is left out by the rules of its folder", hint=hint)
        return chosen


def check_program(run: ProgramRun, sink: Sink) -> None:
    """What a person should know before it starts. Raises ConfigError where there is nothing to run, or no way to."""
    if not run.program:
        raise ConfigError("there is no program to run", hint="hetctl run --emulate SPEC -- python script.py")
    say_unverified(run.launch, sink)
    if run.cluster.shares_devices:
        sink.warn("a rank's GPU is HETCTL_DEVICE_INDEX here: LOCAL_RANK counts ranks, which are more than GPUs")
    if not run.launch.here:
        stays = "what the program writes beside them stays on each host, in ~/.cache/hetctl/code"
        none = "sends no files: no word of the program is a file here"
        sink.say(f"{run.sent.sentence}; {stays}" if run.sent else none)


def run_program(run: ProgramRun, folder: RunFolder, sink: Sink) -> dict[str, Any]:
    """Start the program on every rank and see it through. Returns the summary of its run folder."""
    with sink.outliving_readers(), held_hosts(run.launch, folder, sink), on_file(folder) as place:
        return _see_through(run, folder, place, sink)


def _see_through(run: ProgramRun, folder: RunFolder, place: OnFile, sink: Sink) -> dict[str, Any]:
    began, launch, script = time.monotonic(), run.launch, run.script
    agents = start_agents_on(launch, place, program=run.sent, console=sink)
    with given_up(agents):
        work = Work(
            tuple(w if script is None or w != str(script) else script.name for w in run.program),
            settings=tuple(_settings(run)),
            cwd=str(Path.cwd()) if launch.here else None,
        )
        specs = host_specs(agents, launch, work, run=folder.identity)
    evidence: list[dict[str, Any]] = []

    def on_event(told: Told) -> None:
        if isinstance(told.event, EngineAccount):
            evidence.append({"rank": told.rank, **present(told.event)})

    with Follower({s.rank: folder.log(s.rank) for s in launch.seats}, lambda rank, line: _show(sink, rank, line)):
        outcome = supervise(agents, specs, on_event, place=place, say=sink.warn)
    summary: dict[str, Any] = {
        "run": folder.name,
        "status": "interrupted" if outcome.interrupted else "done",
        "program": list(run.program),
        "islands": [{"name": i.name, "vendor": i.vendor, "ranks": list(i.ranks)} for i in launch.islands],
        "wall_s": time.monotonic() - began,
        "run_dir": str(folder.path),
        "processes_left": outcome.left,
        "links": outcome.links,
        "bridges": sorted(evidence, key=lambda one: int(one["rank"])),
    }
    if outcome.interrupted:
        summary["signal"] = outcome.signal
    hosts = [s.host for s in launch.seats]
    failure = None if outcome.interrupted else record_failure(folder, outcome, hosts, agents.sites)
    if failure is not None:
        summary |= {"status": "failed", "failure": failure["reason"]}
    folder.write_summary(summary)
    sink.say(left_sentence(outcome))
    return summary


def rank_speeds(cluster: Cluster, plan: Plan | None) -> list[float] | None:
    """What each rank computes a second against the slowest; of a plan of whole models the samples it gives each.

    None where a class of the devices is unknown, or a device of the plan is in no island of the cluster.
    """
    if plan is not None and all(len(r.stages) == 1 and r.stages[0].tensor_parallel == 1 for r in plan.replicas):
        found = {rank: r.samples / len(r.stages[0].ranks) for r in plan.replicas for rank in r.stages[0].ranks}
        if len(found) == plan.world_size:
            return _against_slowest([found[rank] for rank in range(plan.world_size)])
    try:
        pools = read_pools(cluster, precision=precision_of(cluster, Recipe()))
    except ConfigError:
        return None
    by_rank = {rank: pool.rates.flops_per_s for pool in pools for rank in pool.ranks}
    by_member = {member: by_rank[rank] for rank, _, member, _ in seats(cluster)}
    members = [Member(s.host, s.device) for s in Launch.of(cluster, plan).seats]
    return _against_slowest([by_member[m] for m in members]) if by_member.keys() >= set(members) else None


def _against_slowest(speeds: list[float]) -> list[float]:
    return [speed / min(speeds) for speed in speeds]


def _settings(run: ProgramRun) -> Iterator[Setting]:
    if run.as_nccl:
        yield Setting(variables.AS_NCCL, "1", "--as-nccl")
    if speeds := rank_speeds(run.cluster, run.plan):
        told = ",".join(f"{speed:.6g}" for speed in speeds)
        yield Setting(variables.SPEEDS, told, "of the plan, or of the devices: for hetctl.data")


def _bridges(cluster: Cluster, wanted: str) -> tuple[PlannedBridge, ...]:
    bridges = []
    for a, b in combinations(cluster.islands, 2):
        chosen = choose_transport(cluster.link(a.name, b.name), a.name, b.name, forced=wanted)
        bridges.append(PlannedBridge((a.name, b.name), chosen.kind, (), chosen.reason, wanted != "auto"))
    return tuple(bridges)


def _show(sink: Sink, rank: int, line: str) -> None:
    sink.await_reader()
    sink.people.print(f"[{rank}] {line}", highlight=False, markup=False, soft_wrap=True)
