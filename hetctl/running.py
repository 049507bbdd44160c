"""`hetctl run`: a program's ranks on a cluster's islands, their output as it comes, and how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hetctl.comm.cluster import Cluster
from hetctl.comm.errors import ConfigError
from hetctl.comm.files import write_atomically
from hetctl.comm.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.plan import Bridge, load_plan
from hetctl.console import Sink
from hetctl.launcher.environment import PlannedPlace, Seat, device_type, placement_of
from hetctl.launcher.logs import Follower
from hetctl.launcher.runfolder import create_run
from hetctl.launcher.workers import local_host
from hetctl.render.run import failure_lines
from hetctl.supervising import record_failure, supervise
from hetctl.trainer.assemble import choose_transport
from hetctl.where import find_running_cluster

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
    sink: Sink,
) -> dict[str, Any]:
    """Start the program on every rank and see it through. Returns the summary of its run folder."""
    argv = _argv(program)
    plan = load_plan(plan_file) if plan_file else None
    cluster = find_running_cluster(cluster_file, emulate, plan=plan, sink=sink)
    places, seats = seats_of(cluster)
    bridges = plan.bridges if plan else _bridges(cluster, bridge or "auto")
    began = time.monotonic()
    folder = create_run(run_dir, Path(argv[-1] if len(argv) == 2 else argv[min(1, len(argv) - 1)]).stem)
    placement = placement_of(places, bridges, seats, runs=cluster.runs, verify_bridge=verify_bridge)
    files = {PLACEMENT_VARIABLE: folder.launch / "placement.json"}
    write_atomically(files[PLACEMENT_VARIABLE], placement.to_json())
    extra = {AS_NCCL: "1"} if as_nccl else {}
    kind = device_type(cluster.runs)
    host = local_host(seats, argv, folder, files=files, device_type=kind, cwd=Path.cwd(), extra=extra)
    with Follower({s.rank: folder.log(s.rank) for s in seats}, lambda rank, line: _show(sink, rank, line)):
        outcome = supervise([host], lambda event: None, say=sink.warn)
    summary = {
        "run": folder.name,
        "status": "interrupted" if outcome.interrupted else "done",
        "program": list(program),
        "islands": [{"name": p.name, "vendor": p.vendor, "ranks": list(p.ranks)} for p in places],
        "wall_s": time.monotonic() - began,
        "run_dir": str(folder.path),
        "processes_left": outcome.left,
    }
    failure = None if outcome.interrupted else record_failure(folder, outcome, [s.host for s in seats])
    if failure is not None:
        summary |= {"status": "failed", "failure": failure["reason"]}
        for line in failure_lines(failure):
            sink.errors.print(line, highlight=False, markup=False, soft_wrap=True)
    folder.write_summary(summary)
    return summary


def _argv(program: Sequence[str]) -> list[str]:
    """The program's argv; `python` is the interpreter that runs hetctl on this machine."""
    if not program:
        raise ConfigError("there is no program to run", hint="hetctl run --emulate SPEC -- python script.py")
    first = sys.executable if Path(program[0]).name in ("python", "python3") else program[0]
    return [first, *program[1:]]


def seats_of(cluster: Cluster) -> tuple[list[PlannedPlace], list[Seat]]:
    """Ranks in the order of islands and their members."""
    places: list[PlannedPlace] = []
    seats: list[Seat] = []
    for island in cluster.islands:
        first = len(seats)
        seats += [Seat(first + i, m.host, m.device) for i, m in enumerate(island.members)]
        places.append(PlannedPlace(island.name, island.vendor, tuple(range(first, len(seats)))))
    return places, seats


def _bridges(cluster: Cluster, wanted: str) -> tuple[Bridge, ...]:
    bridges = []
    for a, b in combinations(cluster.islands, 2):
        chosen = choose_transport(cluster.link(a.name, b.name), a.name, b.name, forced=wanted)
        bridges.append(Bridge((a.name, b.name), chosen.kind, (), chosen.reason, wanted != "auto"))
    return tuple(bridges)


def _show(sink: Sink, rank: int, line: str) -> None:
    sink.people.print(f"[{rank}] {line}", highlight=False, markup=False, soft_wrap=True)
