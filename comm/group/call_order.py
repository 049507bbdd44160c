"""Which collectives the ranks of a group called, in their order: compared when something fails or takes long.

All ranks of a group must call the same ones. Where one does not, each waits in its own, or takes another's bytes.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from hetctl.comm.contract.units import listed
from hetctl.comm.operation.recorder import RecordedOperation

KEPT = 64  # calls: ranks that wait for each other are not further apart
# Those whose size is the same on all ranks; of others it may follow from the rank
OF_ONE_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter", "reduce_scatter_single"}
Call = tuple[str, int]  # what, and how many bytes


class CallOrder:
    """This rank's last calls in one group."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, RecordedOperation]] = deque(maxlen=KEPT)

    def add(self, number: int, entry: RecordedOperation) -> None:
        """The group's collective of this number, from 1, is called here."""
        self._calls.append((number, entry))

    def waits(self, seconds: float) -> bool:
        """Whether one has been under way for as long."""
        now = time.time()
        return any(entry.ended is None and now - entry.started > seconds for _, entry in list(self._calls))

    def told(self) -> str:
        """As text, for other ranks."""
        return json.dumps([(number, entry.operation, entry.bytes) for number, entry in list(self._calls)])


def disagreement(told: Mapping[int, str], names: Sequence[str]) -> str | None:
    """A sentence on the first call in which ranks differ, if they do: who called what.

    `told` is what ranks said of their calls, `names` what each is called.
    """
    for calls in _by_number(told):
        kinds: dict[Call, list[int]] = {}
        for rank, (what, size) in calls.items():
            kinds.setdefault((what, size if what in OF_ONE_SIZE else 0), []).append(rank)
        if len(kinds) > 1:
            *few, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            others = " and ".join(f"{_of(ranks, names)} called {_shown(calls[ranks[0]])}" for ranks in few)
            return f"{others} where {_of(most, names)} called {_shown(calls[most[0]])}"
    return None


def absence(told: Mapping[int, str], names: Sequence[str]) -> str | None:
    """A sentence on the first call that some ranks have not made, if there is one."""
    for calls in _by_number(told):
        if absent := [rank for rank in told if rank not in calls]:
            return f"{_of(absent, names)} did not call the {_shown(next(iter(calls.values())))}"
    return None


def _by_number(told: Mapping[int, str]) -> Iterator[dict[int, Call]]:
    """The calls of each number that no rank has forgotten, by rank."""
    calls = {rank: {n: (what, size) for n, what, size in json.loads(text)} for rank, text in told.items()}
    first = max((min(mine) for mine in calls.values() if mine), default=1)
    last = max((max(mine) for mine in calls.values() if mine), default=0)
    for number in range(first, last + 1):
        yield {rank: mine[number] for rank, mine in calls.items() if number in mine}


def _shown(call: Call) -> str:
    what, size = call
    return f"{what} of {size} bytes" if size else what


def _of(ranks: Sequence[int], names: Sequence[str]) -> str:
    return listed([names[rank] for rank in sorted(ranks)], most=4)
