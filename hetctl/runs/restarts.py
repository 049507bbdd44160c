"""Runs that go on after failures: from the last checkpoint, and with `--allow-missing` on the hosts that remain."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError, HetctlError, Infeasible

NO_PROGRESS = 3  # starts from the same checkpoint in a row after which going on is no use


@dataclass
class Restarts:
    """What is left to try. `starts` are the checkpoints that attempts began from (None: the beginning)."""

    max_restarts: int
    allow_missing: bool
    used: int = 0
    starts: list[str | None] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # hosts that were left out, and why
    saved: bool = False  # a checkpoint was committed: what the folder held before is no longer where to go on from

    def began(self, start: str | None) -> None:
        self.starts.append(start)

    def why_not_again(self, error_type: str | None = None) -> str | None:
        """None when another attempt makes sense, otherwise why not ('' when none was asked for)."""
        if self.max_restarts and error_type == ConfigError.__name__:
            return "what is wrong stays as it is: it has to be put right first"
        if self.used >= self.max_restarts:
            return f"{self.max_restarts} restarts are used up" if self.max_restarts else ""
        last = self.starts[-NO_PROGRESS:]
        if len(last) == NO_PROGRESS and len(set(last)) == 1:
            where = last[0] or "the beginning"
            return f"{NO_PROGRESS} attempts in a row began at {where} and did not get to the next checkpoint"
        return None


def without(cluster: Cluster, hosts: Collection[str]) -> Cluster:
    """The cluster that remains. Raises Infeasible when nothing does."""
    islands = []
    for island in cluster.islands:
        members = tuple(m for m in island.members if m.host not in hosts)
        islands += [replace(island, members=members)] if members else []
    if not islands:
        raise Infeasible(f"nothing remains of the cluster without {', '.join(sorted(hosts))}")
    names = {i.name for i in islands}
    return replace(
        cluster,
        hosts=tuple(h for h in cluster.hosts if h.name not in hosts),
        islands=tuple(islands),
        links=tuple(link for link in cluster.links if set(link.islands) <= names),
        measured=tuple(m for m in cluster.measured if not set(m.hosts) & set(hosts)),
    )


def unreachable_hosts(error: HetctlError) -> dict[str, str]:
    """The hosts that an error of starting agents names as unreachable, where it names no other."""
    gone = {name: e.message for name, e in error.hosts.items() if e.exit_code == 4}
    return gone if len(gone) == len(error.hosts) else {}
