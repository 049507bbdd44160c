"""`hetctl run`: a program's ranks on a cluster's islands, their output as it comes, and how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.contract.plan import PlannedBridge, load_plan
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import PlannedPlace, Seat, Setting, device_type, placement_of
from hetctl.launcher.supervisor.agent_link import Event
from hetctl.launcher.run_folder.logs import Follower
from hetctl.launcher.run_folder.folder import create_run
from hetctl.launcher.supervisor.site import Site
from hetctl.launcher.supervisor.host_specs import host_specs
from hetctl.runs.launch import Launch, start_agents_on, choose_way, say_unverified, store_ports
from hetctl.render.run import failure_lines
from hetctl.runs.submit import outside_allocation, submit
from hetctl.runs.supervise import left_sentence, record_failure, supervise
from hetctl.trainer.planning.assemble import choose_transport
from hetctl.runs.where import find_running_cluster

AS_NCCL = "HETCTL_AS_NCCL"


def run_program(
    program: Sequence[str],
    *,
    cluster_file: Path | None,
    plan_file: Path | None,
    emulate: str | None,
    bridge: str | None,
    as_nccl: bool,
    verify_bridge: bool,
    run_dir: Path | None,
    way: str = "auto",
    sink: Sink,
) -> dict[str, Any]:
    """Start the program on every rank and see it through. Returns the summary of its run folder."""
    _check(program)
    plan = load_plan(plan_file) if plan_file else None
    cluster = find_running_cluster(cluster_file, emulate, plan=plan, sink=sink)
    if cluster.shares_devices:
        sink.warn("a rank's GPU is HETCTL_DEVICE_INDEX here: LOCAL_RANK counts ranks, which are more than GPUs")
    places, seats = seats_of(cluster)
    bridges = plan.bridges if plan else _bridges(cluster, bridge or "auto")
    label = Path(program[-1] if len(program) == 2 else program[min(1, len(program) - 1)]).stem
    if outside_allocation(way):
        return submit(sys.argv[1:], list(dict.fromkeys(s.host for s in seats)), run_dir, label=label, sink=sink)
    began = time.monotonic()
    folder = create_run(run_dir, label)
    say_unverified(bridges, verify=verify_bridge, sink=sink)
    placement = placement_of(places, bridges, seats, runs=cluster.runs, verify_bridge=verify_bridge)
    launch = Launch(cluster, tuple(seats), way=choose_way(way))
    own = (Setting(AS_NCCL, "1", "--as-nccl"),) if as_nccl else ()
    script = None if launch.here else _script(program)
    agents = start_agents_on(launch, folder, program=script.parent if script else None, sink=sink)

    def files(site: Site) -> dict[str, tuple[Path, str]]:
        return {PLACEMENT_VARIABLE: (site.folder.launch / "placement.json", placement.to_json())}

    specs = host_specs(
        agents.sites,
        seats,
        [w if script is None or w != str(script) else script.name for w in map(str, program)],
        run=folder.identity,
        files=files,
        store_ports=store_ports(),
        device_type=device_type(cluster.runs, [p.vendor for p in places]),
        settings={name: (*settings, *own) for name, settings in launch.settings().items()},
        cwd=str(Path.cwd()) if launch.here else None,
        ports=launch.ports(bridges),
    )
    evidence: list[dict[str, Any]] = []

    def on_event(event: Event) -> None:
        if event["event"] == "bridge":
            evidence.append({k: v for k, v in event.items() if k not in ("event", "host", "n")})

    with Follower({s.rank: folder.log(s.rank) for s in seats}, lambda rank, line: _show(sink, rank, line)):
        outcome = supervise(agents, specs, on_event, folder=folder, say=sink.warn)
    summary: dict[str, Any] = {
        "run": folder.name,
        "status": "interrupted" if outcome.interrupted else "done",
        "program": list(program),
        "islands": [{"name": p.name, "vendor": p.vendor, "ranks": list(p.ranks)} for p in places],
        "wall_s": time.monotonic() - began,
        "run_dir": str(folder.path),
        "processes_left": outcome.left,
        "links": outcome.links,
        "bridges": sorted(evidence, key=lambda one: one["rank"]),
    }
    if outcome.interrupted:
        summary["signal"] = outcome.signal
    failure = None if outcome.interrupted else record_failure(folder, outcome, [s.host for s in seats], agents.sites)
    if failure is not None:
        summary |= {"status": "failed", "failure": failure["reason"]}
        for line in failure_lines(failure):
            sink.errors.print(line, highlight=False, markup=False, soft_wrap=True)
    folder.write_summary(summary)
    sink.say(left_sentence(outcome))
    return summary


def _check(program: Sequence[str]) -> None:
    if not program:
        raise ConfigError("there is no program to run", hint="hetctl run --emulate SPEC -- python script.py")


def _script(program: Sequence[str]) -> Path | None:
    """The first word of a program that is a file here: its folder travels to hosts that cannot see it."""
    return next((Path(word) for word in program if Path(word).is_file()), None)


def seats_of(cluster: Cluster) -> tuple[list[PlannedPlace], list[Seat]]:
    """Ranks in the order of islands and their members."""
    places: list[PlannedPlace] = []
    seats: list[Seat] = []
    for island in cluster.islands:
        first = len(seats)
        seats += [Seat(first + i, m.host, m.device) for i, m in enumerate(island.members)]
        places.append(PlannedPlace(island.name, island.vendor, tuple(range(first, len(seats)))))
    return places, seats


def _bridges(cluster: Cluster, wanted: str) -> tuple[PlannedBridge, ...]:
    bridges = []
    for a, b in combinations(cluster.islands, 2):
        chosen = choose_transport(cluster.link(a.name, b.name), a.name, b.name, forced=wanted)
        bridges.append(PlannedBridge((a.name, b.name), chosen.kind, (), chosen.reason, wanted != "auto"))
    return tuple(bridges)


def _show(sink: Sink, rank: int, line: str) -> None:
    sink.people.print(f"[{rank}] {line}", highlight=False, markup=False, soft_wrap=True)
