"""Runs a stage's action list: compute, and what must cross the stage's boundaries, for stages of any widths."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.plan import Plan, Replica
from hetctl.trainer.groups import DIRECTIONS, ProcessGroups
from hetctl.trainer.headloss import IGNORED
from hetctl.trainer.model import StageModel
from hetctl.trainer.schedule import stage_actions
from hetctl.trainer.spans import overlaps, share
from hetctl.trainer.timeline import Timeline

POSTED_AHEAD = 2  # receives outstanding per boundary and direction, beside the one that is waited for


@dataclass(frozen=True)
class Place:
    """Where this rank stands in the plan: its replica, stage, and part of the stage's samples."""

    rank: int
    replica: int
    stage: int
    part: int  # which of the width's shares

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        placed = plan.ranks[rank]
        if placed.replica is None:
            return Place(rank, -1, -1, 0)  # idle
        stage = placed.stages[0]
        part = plan.replicas[placed.replica].stages[stage].ranks.index(rank)
        return Place(rank, placed.replica, stage, part)


@dataclass
class MicroBatch:
    """One micro-batch's share of this rank: inputs [samples, seq] and targets [samples, seq]."""

    inputs: Tensor
    targets: Tensor


@dataclass
class _Piece:
    peer: int
    first: int  # in this rank's share
    past_last: int


class Boundary:
    """What this rank exchanges with one neighbouring stage, in one direction of travel."""

    def __init__(self, plan: Plan, place: Place, groups: ProcessGroups, *, other: int, direction: str) -> None:
        replica = plan.replicas[place.replica]
        mine, theirs = replica.stages[place.stage], replica.stages[other]
        low, _ = share(mine.micro_batch_size, mine.width, place.part)
        self.group = groups.boundary(mine.ranks + theirs.ranks, direction)
        self.tag = DIRECTIONS.index(direction)
        self.pieces = [
            _Piece(theirs.ranks[o.peer], o.first - low, o.past_last - low)
            for o in overlaps(mine.micro_batch_size, mine.width, place.part, theirs.width)
        ]
        self.peers = tuple(p.peer for p in self.pieces)
        self.bridged = plan.crosses_islands((place.rank, *self.peers))
        self.posted_ahead = POSTED_AHEAD if self._waits_on_host() else 0
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def _waits_on_host(self) -> bool:
        """Whether a posted receive costs the device nothing.

        A native receive is a kernel that spins until its data comes. Loading another kernel for the first time may
        wait for all that run: with receives posted before the forward that answers them, a deadlock.
        """
        return self.bridged or not torch.cuda.is_available()

    def send(self, data: Tensor) -> None:
        """Start sending each peer its samples of `data`; the memory is held until they have left."""
        data = data.contiguous()
        for piece in self.pieces:
            part = data[piece.first : piece.past_last]
            self._sent.append((dist.isend(part, piece.peer, group=self.group, tag=self.tag), data))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def post(self, like: Tensor) -> tuple[Tensor, list[Any]]:
        """Post the receives of one micro-batch: the buffer they fill and the work to wait for."""
        buffer = torch.empty_like(like)
        works = [dist.irecv(buffer[p.first : p.past_last], p.peer, group=self.group, tag=self.tag) for p in self.pieces]
        return buffer, works

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
        self._post(self.boundary.posted_ahead)
        return buffer

    def _post(self, wanted: int) -> None:
        while self._next < self.count and len(self._posted) < wanted:
            self._posted.append(self.boundary.post(self.like))
            self._next += 1


class StagePipeline:
    """One rank's part of a pipeline: the stage's module, its boundaries, and the schedule it follows."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        model: StageModel,
        groups: ProcessGroups,
        *,
        timeline: Timeline,
        boundary: type[Boundary] = Boundary,
    ) -> None:
        self.plan, self.place, self.model, self.timeline = plan, place, model, timeline
        self.replica: Replica = plan.replicas[place.replica]
        self.stage = self.replica.stages[place.stage]
        low, high = share(self.stage.micro_batch_size, self.stage.width, place.part)
        self.samples = high - low
        self.is_last = place.stage == len(self.replica.stages) - 1
        before, after = place.stage - 1, place.stage + 1

        def towards(other: int, direction: str) -> Boundary | None:
            exists = 0 <= other < len(self.replica.stages)
            return boundary(plan, place, groups, other=other, direction=direction) if exists else None

        self.forward_in, self.forward_out = towards(before, "forward"), towards(after, "forward")
        self.backward_in, self.backward_out = towards(after, "backward"), towards(before, "backward")
        self._connect()

    def train_step(self, batch: Sequence[MicroBatch], *, scale: float) -> tuple[Tensor, Tensor]:
        """Forward and backward of all micro-batches. Gradients accumulate; the loss is scaled by `scale`.

        Returns this rank's (sum of token losses, number of valid tokens), fp64; zero before the last stage.
        """
        actions = stage_actions(len(batch), self.plan.forwards_of(self.place.replica, self.place.stage))
        like = self._boundary_like(batch[0].inputs)
        forward = Inbox(self.forward_in, len(batch), like) if self.forward_in else None
        backward = Inbox(self.backward_in, len(batch), like) if self.backward_in else None
        totals = torch.zeros(2, dtype=torch.float64, device=batch[0].inputs.device)
        alive: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> (stage input, stage output or loss)
        for action in actions:
            k = action.micro_batch
            if action.kind == "F":
                alive[k] = self._forward(k, batch[k], forward, totals, scale)
            else:
                self._backward(k, *alive.pop(k), backward)
        self._finish()
        return totals[0], totals[1]

    @torch.no_grad()
    def evaluate(self, batch: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Forward only: (sum of token losses, number of valid tokens), fp64; zero before the last stage."""
        like = self._boundary_like(batch[0].inputs)
        forward = Inbox(self.forward_in, len(batch), like) if self.forward_in else None
        totals = torch.zeros(2, dtype=torch.float64, device=batch[0].inputs.device)
        for k, micro_batch in enumerate(batch):
            self._forward(k, micro_batch, forward, totals, 1.0)
        self._finish()
        return totals[0], totals[1]

    def _connect(self) -> None:
        """One element over every pair of ranks that will ever talk, in one order that all ranks share.

        Native libraries connect a pair at its first transfer, and block until the peer comes to the same one:
        left to the schedule, two ranks would each wait at another boundary's first transfer for ever.
        """
        device = next(self.model.parameters()).device
        meetings: list[tuple[tuple[int, ...], bool, int, Boundary]] = []
        for boundary, sends, other in (
            (self.forward_in, False, self.place.stage - 1),
            (self.backward_out, True, self.place.stage - 1),
            (self.forward_out, True, self.place.stage + 1),
            (self.backward_in, False, self.place.stage + 1),
        ):
            if boundary is not None:
                edge = min(self.place.stage, other)
                for peer in boundary.peers:
                    turn = (edge, boundary.tag, *sorted((self.place.rank, peer)))
                    meetings.append((turn, sends, peer, boundary))
        for _, sends, peer, meeting in sorted(meetings, key=lambda m: m[0]):
            element = torch.zeros(1, device=meeting.carries(device))
            (dist.send if sends else dist.recv)(element, peer, group=meeting.group, tag=meeting.tag)

    def _forward(
        self, k: int, data: MicroBatch, inbox: Inbox | None, totals: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        x = data.inputs if inbox is None else self._take(inbox, "wait-F", k)
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        with self.timeline.span("F", micro_batch=k):
            y: Tensor
            if self.is_last:
                y, loss = self.model.loss(x, data.targets, scale=scale)
                totals[0] += loss
                totals[1] += (data.targets != IGNORED).sum()
            else:
                y = self.model(x)
        if self.forward_out is not None:
            self.forward_out.send(y.detach())
        return x, y

    def _backward(self, k: int, x: Tensor, y: Tensor, inbox: Inbox | None) -> None:
        gradient = None if inbox is None else self._take(inbox, "wait-B", k)
        with self.timeline.span("B", micro_batch=k):
            torch.autograd.backward(y, gradient)
        if self.backward_out is not None:
            assert x.grad is not None
            self.backward_out.send(x.grad)

    def _take(self, inbox: Inbox, kind: str, k: int) -> Tensor:
        about = {"micro_batch": k, "peers": inbox.boundary.peers, "bridged": inbox.boundary.bridged}
        with self.timeline.span(kind, **about):
            return inbox.take()

    def _boundary_like(self, inputs: Tensor) -> Tensor:
        """An empty tensor of a boundary's share: [samples, seq, hidden] in the model's own dtype."""
        dtype = next(self.model.parameters()).dtype
        shape = (self.samples, inputs.shape[1], self.model.shape.hidden)
        return torch.empty(shape, dtype=dtype, device=inputs.device)

    def _finish(self) -> None:
        for boundary in (self.forward_out, self.backward_out):
            if boundary is not None:
                boundary.finish()
