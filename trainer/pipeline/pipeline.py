"""Runs a rank's action list: compute, and what must cross its stages' boundaries, for stages of any widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.plan import Plan, Replica
from hetctl.trainer.data.batches import MicroBatch
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.preferences import Preferences
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.model.split_backward import WeightGradients
from hetctl.trainer.pipeline.boundary import Boundary, Inbox
from hetctl.trainer.ranks.groups import Place, ProcessGroups
from hetctl.trainer.ranks.timeline import Timeline
from hetctl.trainer.schedule import SCHEDULES, Action


class LocalStage:
    """One stage of this rank: its module, its boundaries, and the micro-batches that are on their way through it."""

    def __init__(
        self, plan: Plan, place: Place, model: StageModel, groups: ProcessGroups, boundary: type[Boundary]
    ) -> None:
        self.stage, self.model = place.stage, model
        count = len(plan.replicas[place.replica].stages)
        self.is_last = place.stage == count - 1

        def towards(other: int, direction: str) -> Boundary | None:
            if not 0 <= other < count:
                return None
            return boundary(plan, place, groups, other=other, direction=direction, tensor=model.tensor)

        before, after = place.stage - 1, place.stage + 1
        self.forward_in, self.forward_out = towards(before, "forward"), towards(after, "forward")
        self.backward_in, self.backward_out = towards(after, "backward"), towards(before, "backward")
        self.alive: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> (stage input, stage output or loss)
        self.weight_gradients: dict[int, list[Any]] = {}  # micro-batch -> weight gradients still to be made
        self.inboxes: dict[str, Inbox | None] = {}

    def expect(self, kinds: str, count: int, like: Tensor) -> None:
        """Begin receiving so many micro-batches, forward ('F') and backward ('B')."""
        for kind, boundary in (("F", self.forward_in), ("B", self.backward_in)):
            self.inboxes[kind] = Inbox(boundary, count, like) if boundary is not None and kind in kinds else None

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for boundary in (self.forward_out, self.backward_out):
            if boundary is not None:
                boundary.finish()

    def meetings(self) -> Iterator[tuple[bool, Boundary]]:
        """(whether this side sends, boundary) of each direction."""
        for boundary, sends in (
            (self.forward_in, False),
            (self.backward_out, True),
            (self.forward_out, True),
            (self.backward_in, False),
        ):
            if boundary is not None:
                yield sends, boundary


class StagePipeline:
    """One rank's part of a pipeline: its stages, and the schedule they follow."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        models: Sequence[StageModel],
        groups: ProcessGroups,
        *,
        timeline: Timeline,
        boundary: type[Boundary] = Boundary,
        deferred: WeightGradients | None = None,
        beta: float | None = None,
    ) -> None:
        """With a `beta` its samples are preference pairs, of which DPO makes a loss."""
        self.plan, self.place, self.models = plan, place, tuple(models)
        self.timeline, self.deferred, self.beta = timeline, deferred, beta
        self.replica: Replica = plan.replicas[place.replica]
        self.stage = self.replica.stages[place.stage]
        low, high = share(self.stage.micro_batch_size, self.stage.width, place.part)
        self.samples = high - low
        self.chunks = [
            LocalStage(plan, place.at(stage), model, groups, boundary)
            for stage, model in zip(place.stages, models, strict=True)
        ]
        self._connect()

    def train_step(self, batch: Sequence[MicroBatch], *, scale: float) -> Tensor:
        """Forward and backward of all micro-batches. Gradients accumulate; the loss is scaled by `scale`.

        Returns this rank's sums, fp64: losses and valid tokens, of pairs also their number, how many are preferred
        rightly, and their margins. Zero before the last stage, and on all but the first rank of a tensor group.
        """
        return self._run(self._actions(len(batch)), batch, scale)

    @torch.no_grad()
    def evaluate(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Forward only: the same sums."""
        return self._run([a for a in self._actions(len(batch)) if a.kind == "F"], batch, 1.0)

    @torch.no_grad()
    def refer(self, batch: Sequence[MicroBatch]) -> None:
        """Forward without adapters: gives pairs on the last stage their reference, which the other two ask for."""
        with ExitStack() as inside:
            for model in self.models:
                inside.enter_context(model.without_adapters())
            self._run([a for a in self._actions(len(batch)) if a.kind == "F"], batch, 1.0, span="R")

    def _actions(self, micro_batches: int) -> Sequence[Action]:
        place = self.place
        return SCHEDULES[self.plan.schedule].actions(
            micro_batches,
            stages=len(self.replica.stages),
            held=place.stages,
            forwards_ahead=self.plan.forwards_of(place.replica, place.stage),
        )

    def _run(self, actions: Sequence[Action], batch: Sequence[MicroBatch], scale: float, *, span: str = "F") -> Tensor:
        """`span` is what the timeline calls its forwards."""
        kinds = "".join({a.kind for a in actions})
        for chunk in self.chunks:
            chunk.expect(kinds, len(batch), self._boundary_like(batch[0].inputs))
        totals = torch.zeros(sums_of(self.beta), dtype=torch.float64, device=batch[0].inputs.device)
        for action in actions:
            chunk, k = self.chunks[action.chunk], action.micro_batch
            if action.kind == "F":
                totals += self._forward(chunk, k, batch[k], scale, span)
            elif action.kind == "B":
                self._backward(chunk, k)
            else:
                self._make_weight_gradients(chunk, k)
        self._finish()
        return totals

    def _connect(self) -> None:
        """One element over every pair of ranks that will ever talk, in one order that all ranks share.

        Native libraries connect a pair at its first transfer, and block until the peer comes to the same one:
        left to the schedule, two ranks would each wait at another boundary's first transfer for ever.
        """
        device = next(self.models[0].parameters()).device
        meetings: list[tuple[tuple[int, ...], bool, int, Boundary]] = []
        for chunk in self.chunks:
            for sends, boundary in chunk.meetings():
                for peer in boundary.peers:
                    turn = (boundary.edge, boundary.tag, *sorted((self.place.rank, peer)))
                    meetings.append((turn, sends, peer, boundary))
        for _, sends, peer, meeting in sorted(meetings, key=lambda m: m[0]):
            element = torch.zeros(1, device=meeting.carries(device))
            (dist.send if sends else dist.recv)(element, peer, group=meeting.group, tag=meeting.tag)

    def _forward(self, chunk: LocalStage, k: int, data: MicroBatch, scale: float, span: str) -> Tensor | float:
        """What it adds to the step's sums."""
        sums: Tensor | float = 0.0
        received = self._take(chunk, "F", k, span=span)
        x = data.inputs if received is None else received
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        with self.timeline.span(span, micro_batch=k, stage=chunk.stage):
            y: Tensor
            if not chunk.is_last:
                y = chunk.model(x, data.documents, data.draws)
            elif self.beta is None:
                y, losses = chunk.model.loss(x, data.targets, data.documents, data.draws, scale=scale)
                sums = _sums(losses.sum(), data)
            else:
                y, sums = self._of_pairs(chunk.model, x, data, scale, refers=span == "R")
        if chunk.forward_out is not None:
            chunk.forward_out.send(y.detach())
        if torch.is_grad_enabled():
            chunk.alive[k] = (x, y)
        return sums if self.place.tensor == 0 else 0.0

    def _of_pairs(
        self, model: StageModel, x: Tensor, data: MicroBatch, scale: float, *, refers: bool
    ) -> tuple[Tensor, Tensor | float]:
        """(loss to call backward on, the step's sums) of preference pairs, or their reference."""
        assert self.beta is not None
        assert data.documents is not None
        pairs, about = Preferences(self.beta, data.documents), (x, data.targets, data.documents, data.draws)
        if refers:
            y, losses = model.loss(*about, scale=scale)
            data.reference = pairs.ratios(losses)
            return y, 0.0
        assert data.reference is not None
        y, losses = model.loss(*about, scale=scale, weigh=partial(pairs.weights, reference=data.reference))
        loss, *others = pairs.figures(losses, data.reference)
        return y, _sums(loss, data, *others)

    def _backward(self, chunk: LocalStage, k: int) -> None:
        x, y = chunk.alive.pop(k)
        gradient = self._take(chunk, "B", k)
        with self.timeline.span("B", micro_batch=k, stage=chunk.stage):
            torch.autograd.backward(y, gradient)
        if self.deferred is not None:
            chunk.weight_gradients[k] = self.deferred.take()
        if chunk.backward_out is not None:
            assert x.grad is not None
            chunk.backward_out.send(x.grad)

    def _make_weight_gradients(self, chunk: LocalStage, k: int) -> None:
        assert self.deferred is not None
        with self.timeline.span("W", micro_batch=k, stage=chunk.stage):
            self.deferred.run(chunk.weight_gradients.pop(k))

    def _take(self, chunk: LocalStage, kind: str, k: int, *, span: str = "") -> Tensor | None:
        """What the neighbouring stage sends for a forward or backward; None where there is no neighbour."""
        inbox = chunk.inboxes[kind]
        if inbox is None:
            return None
        about = {"micro_batch": k, "peers": inbox.boundary.peers, "bridged": inbox.boundary.bridged}
        with self.timeline.span(f"wait-{span or kind}", stage=inbox.boundary.other, **about):
            return inbox.take()

    def _boundary_like(self, inputs: Tensor) -> Tensor:
        """An empty tensor of a boundary's share: [samples, seq, hidden] in the model's own dtype."""
        model = self.models[0]
        shape = (self.samples, inputs.shape[1], model.shape.hidden)
        return torch.empty(shape, dtype=model.dtype, device=inputs.device)

    def _finish(self) -> None:
        for chunk in self.chunks:
            chunk.finish()


def sums_of(beta: float | None) -> int:
    """How many sums a step has."""
    return 2 if beta is None else 5


def _sums(loss: Tensor, data: MicroBatch, *others: Tensor) -> Tensor:
    """A micro-batch's part of a step's sums."""
    return torch.stack([x.double() for x in (loss, (data.targets != IGNORED).sum(), *others)])
