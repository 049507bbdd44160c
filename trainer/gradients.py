"""Gradients as sums: accumulated per segment in full precision, summed over all holders once per step.

The gradient of a step is the sum over all samples' token losses divided by all valid tokens, never a mean of
means. Each segment is one flat buffer, so one all-reduce per segment crosses the islands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetctl.comm.plan import Plan, Segment
from hetctl.trainer.groups import ProcessGroups
from hetctl.trainer.model import EMBEDDING, StageModel
from hetctl.trainer.pipeline import Place
from hetctl.trainer.timeline import Timeline


@dataclass
class Bucket:
    """The parameters of one segment on this rank: flat masters and flat gradients in full precision."""

    names: tuple[str, ...]
    compute: tuple[nn.Parameter, ...]  # what the model computes with
    masters: tuple[nn.Parameter, ...]  # what the optimiser updates; the same storage in full precision
    gradient: Tensor  # flat, one view per master
    holders: tuple[int, ...]  # all ranks whose gradients are summed
    group: dist.ProcessGroup | None  # None: this rank is the only holder
    owner: bool  # counts this bucket in norms and checkpoints
    bridged: bool


class Gradients:
    """All buckets of a rank, from the first backward of a step to the optimiser's update."""

    def __init__(self, model: StageModel, plan: Plan, place: Place, groups: ProcessGroups) -> None:
        self.rank = place.rank
        self.buckets = [
            _bucket(names, model.named(), holders, plan, place.rank, groups)
            for names, holders in _assignment(model, plan, place)
        ]

    def synchronise(self, timeline: Timeline) -> None:
        """Sum every bucket over its holders: one all-reduce each, at the end of the step's backward."""
        for number, bucket in enumerate(self.buckets):
            if bucket.group is not None:
                others = tuple(r for r in bucket.holders if r != self.rank)
                with timeline.span("sync", micro_batch=number, peers=others, bridged=bucket.bridged):
                    dist.all_reduce(bucket.gradient, group=bucket.group)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the buckets this rank owns, fp64: summed over all ranks, each parameter once."""
        total = self.buckets[0].gradient.new_zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            if bucket.owner:
                total += bucket.gradient.double().pow(2).sum()
        return total

    def attach(self) -> None:
        """Hand each master its gradient, for the optimiser; `zero_` takes them back."""
        for bucket in self.buckets:
            sizes = [p.numel() for p in bucket.masters]
            for master, view in zip(bucket.masters, bucket.gradient.split(sizes), strict=True):
                master.grad = view.view_as(master)

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply every gradient by `factor`."""
        for bucket in self.buckets:
            bucket.gradient.mul_(factor)

    def zero_(self) -> None:
        """Forget the step's gradients."""
        for bucket in self.buckets:
            bucket.gradient.zero_()
            for master in bucket.masters:
                master.grad = None

    def publish(self) -> None:
        """Give the model the updated masters (nothing to do where they share storage)."""
        with torch.no_grad():
            for bucket in self.buckets:
                for compute, master in zip(bucket.compute, bucket.masters, strict=True):
                    if compute.data_ptr() != master.data_ptr():
                        compute.copy_(master)

    def masters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """(Hugging Face name, master) of every parameter of this rank."""
        for bucket in self.buckets:
            yield from zip(bucket.names, bucket.masters, strict=True)


def _assignment(model: StageModel, plan: Plan, place: Place) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(parameter names, holders) per segment of this stage; a tied embedding is a segment of its own."""
    first_to_last = plan.replicas[place.replica].stages[place.stage].layers
    named = list(model.named())
    found = []
    for segment in plan.segments:
        if first_to_last[0] <= segment.layers[0] and segment.layers[1] <= first_to_last[1]:
            names = tuple(n for n in named if _belongs(n, segment, model))
            holders = next(g for g in segment.groups if place.rank in g)
            found.append((names, holders))
    if model.shape.tied_embeddings and EMBEDDING in named:
        ends = {r for rep in plan.replicas for s in (rep.stages[0], rep.stages[-1]) for r in s.ranks}
        found.append(((EMBEDDING,), tuple(sorted(ends))))
    return found


def _belongs(name: str, segment: Segment, model: StageModel) -> bool:
    if name == EMBEDDING:
        return segment.layers[0] == 0 and not model.shape.tied_embeddings
    if name.startswith("model.layers."):
        return segment.layers[0] <= int(name.split(".")[2]) < segment.layers[1]
    return segment.layers[1] == model.shape.layers  # final norm and LM head


def _bucket(
    names: tuple[str, ...],
    named: dict[str, nn.Parameter],
    holders: tuple[int, ...],
    plan: Plan,
    rank: int,
    groups: ProcessGroups,
) -> Bucket:
    compute = tuple(named[n] for n in names)
    dtype = torch.float64 if compute[0].dtype == torch.float64 else torch.float32
    gradient = torch.zeros(sum(p.numel() for p in compute), dtype=dtype, device=compute[0].device)
    masters = []
    for parameter, view in zip(compute, gradient.split([p.numel() for p in compute]), strict=True):
        master = parameter if parameter.dtype == dtype else nn.Parameter(parameter.detach().to(dtype))
        view = view.view_as(parameter)
        parameter.register_post_accumulate_grad_hook(_Accumulate(view))
        masters.append(master)
    return Bucket(
        names,
        compute,
        tuple(masters),
        gradient,
        holders,
        groups.reduce_group(holders) if len(holders) > 1 else None,
        owner=holders[0] == rank,
        bridged=plan.crosses_islands(holders),
    )


class _Accumulate:
    """Adds a parameter's fresh gradient to its place in the flat buffer, in the buffer's precision."""

    def __init__(self, view: Tensor) -> None:
        self.view = view

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.view.add_(parameter.grad)
        parameter.grad = None
