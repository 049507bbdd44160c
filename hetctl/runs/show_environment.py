"""`hetctl plan --env HOST`: every variable the ranks of one host will get, and why, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.plan import Plan
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import (
    HostShape,
    host_settings,
    interface_of,
    rank_settings,
    without_secrets,
)
from hetctl.launcher.supervisor.launch import Launch

LATER = "(decided on the host)"


def show_environment(plan: Plan, cluster: Cluster, name: str, sink: Sink) -> dict[str, Any]:
    """The table for people and the document for scripts. Raises ConfigError when the host has no ranks."""
    launch = Launch.of(cluster, plan)
    mine, world_size = launch.seats_of.get(name), len(launch.seats)
    if not mine:
        raise ConfigError(f"no rank of the plan is on '{name}'", hint=nearest(name, launch.seats_of))
    host, master = cluster.host_by_name[name], launch.hosts[0]
    cores = host.facts.get("system", {}).get("cpu", {}).get("allowed") or len(mine)
    shape = HostShape(cores, launch.device_type, master.data_address or LATER, interface_of(host), LATER)
    environment = {n: os.environ.get(n, "") for n in (host.access.env if host.access else {})}
    own = host_settings(cluster, host, mine, environment=environment)
    files = {v: Path(LATER) for v in ("TORCHELASTIC_ERROR_FILE", variables.JOB, variables.PLACEMENT, variables.FLIGHT)}
    ranks = {
        s.rank: without_secrets(rank_settings(mine, s, shape, world_size=world_size, files=files, more=own))
        for s in mine
    }
    table = Table("variable", "value", "because", title=f"rank {mine[0].rank} on {name}", title_justify="left")
    for setting in ranks[mine[0].rank]:
        table.add_row(*map(escape, (setting.name, setting.value, setting.reason)))
    sink.say(table)
    if len(mine) > 1:
        others = ", ".join(str(s.rank) for s in mine[1:])
        values = [{s.name: s.value for s in found} for found in ranks.values()]
        unlike = [name for name in values[0] if any(v.get(name) != values[0][name] for v in values)]
        sink.say(f"ranks {others} differ in {', '.join(unlike)}")
    rows = {r: [{"name": s.name, "value": s.value, "reason": s.reason} for s in found] for r, found in ranks.items()}
    return {"host": name, "ranks": {str(rank): found for rank, found in rows.items()}}
