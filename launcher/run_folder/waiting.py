"""Which rank waited for which, from the flight recorders that ranks leave when they fail."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.comm.contract.files import read_json
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.records import Operation, fitting

_NAMED = re.compile(r"\b(?:to|from) rank (\d+)\b")
MAX_BYTES = 64 * 1024 * 1024  # of a file that is read


@dataclass(frozen=True)
class Waiting:
    """One rank's oldest operation that was still pending: for whom it waited (empty: nobody can be named)."""

    rank: int
    operation: str
    group: str
    number: int
    since: float
    targets: tuple[int, ...] = ()


def read_flights(folder: RunFolder, unsure: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Rank -> the operations its flight recorder held when it was dumped."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.path.rglob("flight-rank-*.json")):
        data = read_object(path, unsure)
        operations = data.get("operations")
        if isinstance(data.get("rank"), int) and isinstance(operations, list):
            found[data["rank"]] = operations
    return found


def who_waited(flights: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[Waiting, ...]:
    """Each rank's oldest unfinished operation, and who had not come to it yet.

    Messages name their peer. In a collective those are waited for whose count of operations in that group is behind, or
    where all that left a record were as far, whom the operation's own error names.
    """
    flights = {rank: [fit for o in every if (fit := fitting(Operation, o))] for rank, every in flights.items()}
    pending = {}
    for rank, operations in flights.items():
        open_ = [o for o in operations if o.get("state") not in ("done", "posted")]
        if open_:
            pending[rank] = min(open_, key=lambda o: (o.get("started", 0.0), o.get("number", 0)))
    counts = {rank: _counts(operations) for rank, operations in flights.items()}
    found = []
    for rank, operation in sorted(pending.items()):
        group, peer = str(operation.get("group", "")), operation.get("peer")
        mine = counts[rank].get(group, 0)
        behind = tuple(r for r, c in sorted(counts.items()) if r != rank and group in c and c[group] < mine)
        named = tuple(map(int, _NAMED.findall(str(operation.get("error") or ""))[:1]))
        targets = (peer,) if isinstance(peer, int) else behind or named
        begun = operation.get("started", 0.0)
        name, number = operation.get("operation", "?"), operation.get("number", 0)
        found.append(Waiting(rank, name, group, number, begun, targets))
    return tuple(found)


def root_of(waiting: Iterable[Waiting]) -> int | None:
    """The rank at the end of the chain of waiting: waited for, itself waiting for nobody; None without one."""
    edges = {w.rank: set(w.targets) for w in waiting}
    votes: dict[int, int] = defaultdict(int)
    for start in edges:
        seen, here = {start}, start
        while edges.get(here):
            following = min(edges[here])
            if following in seen:
                break  # a circle: nobody is behind
            seen.add(following)
            here = following
        else:
            if here != start:
                votes[here] += 1
    return max(votes, key=lambda r: (votes[r], -r)) if votes else None


def _counts(operations: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Group -> how many collectives of it a rank has begun."""
    counts: dict[str, int] = defaultdict(int)
    for operation in operations:
        if operation.get("peer") is None:
            counts[str(operation.get("group", ""))] += 1
    return counts


def read_object(path: Path, unsure: list[str]) -> dict[str, Any]:
    """A JSON object, {} when there is no such file; one that cannot be read is said."""
    try:
        if path.stat().st_size > MAX_BYTES:
            unsure.append(f"{path.name} is too large to read")
            return {}
        data = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        unsure.append(f"{path.name} cannot be read: {error}")
        return {}
    return data if isinstance(data, dict) else {}
