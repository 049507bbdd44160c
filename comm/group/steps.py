"""What hierarchical collectives are written in: natives, messages between islands, intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetctl.comm.bridge.bridge import COLLECTIVE, Bridge, Message
from hetctl.comm.group.native import NativeCommunicator
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.operation.intervals import Interval, IslandLayout, overlaps
from hetctl.comm.operation.work import HetWork, OperationDeadline


@dataclass(frozen=True)
class Run:
    """One operation as it runs: its name for errors, and when it must have ended."""

    what: str
    deadline: OperationDeadline


class CollectiveSteps:
    """What every collective needs: the layout, natives by device, and messages over the bridge."""

    def __init__(
        self,
        layout: IslandLayout,
        native: Callable[[torch.device], NativeCommunicator],
        bridge: Bridge,
        device_types: frozenset[str],
    ) -> None:
        self.layout, self.native, self._bridge = layout, native, bridge
        self.device_types = device_types  # that the group's ranks compute on; beside them all have the host

    def send(self, data: torch.Tensor, peer: int, run: Run, *, second: bool = False) -> Message:
        """`second` halves of collectives have lanes of their own: first halves of later ones overtake them."""
        work = HetWork(run.what, [data])
        return self._bridge.send(data, peer, tag=int(second), kind=COLLECTIVE, work=work, deadline=run.deadline)

    def recv(self, data: torch.Tensor, peer: int, run: Run, *, second: bool = False, **how: Any) -> Message:
        work = HetWork(run.what, [data])
        return self._bridge.recv(data, peer, tag=int(second), kind=COLLECTIVE, work=work, deadline=run.deadline, **how)

    def exchange_whole(self, data: torch.Tensor, run: Run) -> list[torch.Tensor]:
        """What other islands hold where this island holds `data`, in island order: one message from each island."""
        layout, size = self.layout, len(self.layout.mine)
        got = [torch.empty_like(data) for _ in layout.foreign]
        moves = []
        for index, island in enumerate(layout.foreign):
            members = layout.islands[island]
            moves += [self.send(data, r, run) for i, r in enumerate(members) if i % size == layout.place]
            moves.append(self.recv(got[index], members[layout.place % len(members)], run))
        arrive(moves)
        return got

    def combine_in_order(self, data: torch.Tensor, others: list[torch.Tensor], how: Reduction) -> None:
        """Reduce into `data` in island order on every rank, so that all islands round alike."""
        parts = [*others[: self.layout.home], data, *others[self.layout.home :]]
        for part in parts[1:]:
            how.combine(parts[0], part)
        if parts[0] is not data:
            data.copy_(parts[0])

    def ship(
        self, data: torch.Tensor, held: Interval, to: int, *, wanted: Sequence[Interval], run: Run
    ) -> list[Message]:
        """Send what this rank holds (`data` is the interval `held`) to whoever in island `to` wants parts of it."""
        start, members = held[0], self.layout.islands[to]
        return [
            self.send(data[first - start : past - start], members[place], run)
            for place, (first, past) in overlaps(held, wanted)
        ]

    def fetch(
        self, data: torch.Tensor, wanted: Interval, source: int, *, held: Sequence[Interval], run: Run, **how: Any
    ) -> list[Message]:
        """Receive the interval `wanted` into `data` from the ranks of island `source` that hold parts of it."""
        start, members = wanted[0], self.layout.islands[source]
        return [
            self.recv(data[first - start : past - start], members[place], run, **how)
            for place, (first, past) in overlaps(wanted, held)
        ]


def arrive(messages: Sequence[Message]) -> None:
    """Wait for messages; on devices the current stream is ordered behind them. Raises the first error."""
    for message in messages:
        message.work.wait()


def padded(block: torch.Tensor, parts: int) -> torch.Tensor:
    """`block` itself where its length divides by `parts`, else a copy with a tail that nobody reads."""
    lacking = -block.numel() % parts
    if not lacking:
        return block
    whole = block.new_zeros(block.numel() + lacking)
    whole[: block.numel()].copy_(block)
    return whole
