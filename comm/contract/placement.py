"""What a rank knows of the plan: who it is, which islands there are, how they are joined. One JSON slice.

The launcher writes it, `HETCTL_PLACEMENT` names it, and the `het` back end of any program reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from typing import Protocol

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.transports import FALLBACK, NATIVE, TransportKind
from hetctl.comm.contract.values import encode


@dataclass(frozen=True)
class PlacedIsland:
    """An island's global ranks and the torch back end that is native to it."""

    name: str
    vendor: str
    torch_backend: str  # nccl or gloo
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PlacedBridge:
    """The transport between two islands (by name); a forced one is taken or refused, never replaced."""

    islands: tuple[str, str]
    transport: TransportKind
    forced: bool = True


@dataclass(frozen=True)
class Placement:
    """The islands of a job as every rank sees them; the same on all ranks."""

    islands: tuple[PlacedIsland, ...]
    bridges: tuple[PlacedBridge, ...] = ()
    hosts: tuple[str, ...] = ()  # per rank: the host's name, for error messages
    verify_bridge: bool = False

    @cached_property
    def island_of_rank(self) -> dict[int, PlacedIsland]:
        return {rank: island for island in self.islands for rank in island.ranks}

    def islands_of(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of `ranks` in each island, in the order of `ranks`; islands joined natively are one.

        Raises ConfigError for strangers.
        """
        found: dict[str, list[int]] = {}
        for rank in ranks:
            island = self.island_of_rank.get(rank)
            if island is None:
                raise ConfigError(f"rank {rank} is in no island of the placement")
            found.setdefault(island.name, []).append(rank)
        joined = joined_natively(found, self.bridges)
        return [tuple(r for r in ranks if self.island_of_rank[r].name in names) for names in joined]

    def transport(self, one: str, other: str) -> TransportKind:
        """What carries messages between two islands; an unlisted pair gets what reaches everywhere.

        So do islands that are to be joined natively, in a group where a third one keeps them apart.
        """
        for bridge in self.bridges:
            if set(bridge.islands) == {one, other}:
                return FALLBACK if bridge.transport == NATIVE else bridge.transport
        return FALLBACK

    def is_forced(self, one: str, other: str) -> bool:
        """Whether a person asked for the transport between two islands: no other may take its place."""
        return any(bridge.forced for bridge in self.bridges if set(bridge.islands) == {one, other})

    def spans_islands(self, ranks: tuple[int, ...]) -> bool:
        """Whether ranks that one native library joins lie in several islands: then it talks over sockets."""
        return len({self.island_of_rank[r].name for r in ranks}) > 1

    def to_json(self) -> str:
        return json.dumps(encode(self))


class Joint(Protocol):
    """What two islands (by name) are planned to talk over, in a plan or in a placement."""

    @property
    def islands(self) -> tuple[str, str]: ...

    @property
    def transport(self) -> TransportKind: ...


def joined_natively(islands: Iterable[str], bridges: Iterable[Joint]) -> list[tuple[str, ...]]:
    """The islands in groups that the vendor's own library joins over sockets; most groups are of one island.

    Those of a group are joined by native ways, and no other way is planned between any two of them. The same answer
    whoever asks, as long as the order of islands is the same.
    """
    planned = {frozenset(bridge.islands): bridge.transport for bridge in bridges}
    groups: list[tuple[str, ...]] = [(name,) for name in islands]

    def alike(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
        kinds = {planned.get(frozenset((a, b))) for a in one for b in other}
        return NATIVE in kinds and kinds <= {NATIVE, None}

    while pair := next((p for p in combinations(groups, 2) if alike(*p)), None):
        groups = [pair[0] + pair[1] if g == pair[0] else g for g in groups if g != pair[1]]
    return groups


_met: list[Placement] = []


def remember(found: Placement) -> None:
    """What the job's ranks found when they met is this process's placement from now on."""
    _met[:] = [found]
    current_placement.cache_clear()


@cache
def current_placement() -> Placement:
    """The placement of this process, from the file `HETCTL_PLACEMENT` names, or as its ranks found it.

    Raises ConfigError.
    """
    if _met and not os.environ.get(variables.PLACEMENT):
        return _met[0]
    return variables.read_named(variables.PLACEMENT, Placement)
