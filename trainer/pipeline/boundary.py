"""What crosses between neighbouring stages of any widths and tensor degrees, and receives posted ahead of their use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.operation.device import accelerator
from hetctl.trainer.model.sample_shares import overlaps, share
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare
from hetctl.trainer.ranks.groups import DIRECTIONS, Place, ProcessGroups

POSTED_AHEAD = 2  # receives outstanding per boundary and direction, beside the one that is waited for


@dataclass(frozen=True)
class _Slice:
    """Samples [first, past_last) of this rank's share, and of their values (flat) the share [low, high) of `parts`."""

    peer: int
    first: int
    past_last: int
    low: int
    high: int
    parts: int

    def of(self, data: Tensor) -> Tensor:
        """What travels of contiguous data: a view, flat."""
        flat = data[self.first : self.past_last].view(-1)
        return flat[flat.numel() // self.parts * self.low : flat.numel() // self.parts * self.high]


class Boundary:
    """What this rank exchanges with one neighbouring stage, in one direction of travel.

    A tensor group's ranks all have (and all need) the same hidden states: each carries its share of the values, and
    the receiving group puts them together again.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        groups: ProcessGroups,
        *,
        other: int,
        direction: str,
        tensor: TensorShare = ALONE,
    ) -> None:
        replica = plan.replicas[place.replica]
        mine, theirs = replica.stages[place.stage], replica.stages[other]
        self.other, self.edge = other, min(place.stage, other)
        self.group = groups.boundary(plan, place.replica, self.edge, direction)
        self.tag = DIRECTIONS.index(direction)
        self.tensor = tensor
        self.pieces = list(_pieces(mine, theirs, place))
        self.peers = tuple(p.peer for p in self.pieces)
        self.bridged = plan.crosses_islands((place.rank, *self.peers))
        self.posted_ahead = POSTED_AHEAD if self._waits_on_host() else 0
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def _waits_on_host(self) -> bool:
        """Whether a posted receive costs the device nothing.

        A native receive is a kernel that spins until its data comes. Loading another kernel for the first time may
        wait for all that run: with receives posted before the forward that answers them, a deadlock.
        """
        return self.bridged or accelerator() is None

    def send(self, data: Tensor) -> None:
        """Start sending each peer its samples of `data`; the memory is held until they have left."""
        data = data.contiguous()
        for piece in self.pieces:
            self._sent.append((dist.isend(piece.of(data), piece.peer, group=self.group, tag=self.tag), data))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def post(self, like: Tensor) -> tuple[Tensor, list[Any]]:
        """Post the receives of one micro-batch: the buffer they fill and the work to wait for."""
        buffer = torch.empty_like(like)
        works = [dist.irecv(p.of(buffer), p.peer, group=self.group, tag=self.tag) for p in self.pieces]
        return buffer, works

    def complete(self, buffer: Tensor) -> None:
        """Put together what the ranks of this tensor group have received."""
        if self.tensor.degree > 1:
            for first, past_last in dict.fromkeys((p.first, p.past_last) for p in self.pieces):
                self.tensor.gather_(buffer[first:past_last])

    def carries(self, device: torch.device) -> torch.device:
        """Where the tensors are that its group carries, for ranks that compute on `device`."""
        return device

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Inbox:
    """Receives of one boundary and direction, posted ahead in micro-batch order."""

    def __init__(self, boundary: Boundary, count: int, like: Tensor) -> None:
        self.boundary, self.count, self.like = boundary, count, like
        self._posted: deque[tuple[Tensor, list[Any]]] = deque()
        self._next = 0
        self._post(boundary.posted_ahead)

    def take(self) -> Tensor:
        """The next micro-batch's data, once it is here."""
        self._post(1)
        buffer, works = self._posted.popleft()
        for work in works:
            work.wait()
        self.boundary.complete(buffer)
        self._post(self.boundary.posted_ahead)
        return buffer

    def _post(self, wanted: int) -> None:
        while self._next < self.count and len(self._posted) < wanted:
            self._posted.append(self.boundary.post(self.like))
            self._next += 1


def _pieces(mine: Stage, theirs: Stage, place: Place) -> Iterator[_Slice]:
    """Whom this rank exchanges which values with: samples by overlap, of each the overlap of two tensor shares."""
    start, _ = share(mine.micro_batch_size, mine.width, place.part)
    parts = math.lcm(mine.tensor_parallel, theirs.tensor_parallel)
    for samples in overlaps(mine.micro_batch_size, mine.width, place.part, theirs.width):
        for values in overlaps(parts, mine.tensor_parallel, place.tensor, theirs.tensor_parallel):
            peer = theirs.ranks[samples.peer * theirs.tensor_parallel + values.peer]
            yield _Slice(peer, samples.first - start, samples.past_last - start, values.first, values.past_last, parts)
