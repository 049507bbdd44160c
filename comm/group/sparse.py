"""Sums of sparse tensors: everybody gathers everybody's entries, whose number differs by rank, and adds them up."""

from __future__ import annotations

import math
from typing import Any

import torch

from hetctl.comm.group.collectives import Collectives
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.group.runner import at_once
from hetctl.comm.group.steps import Run
from hetctl.comm.operation.c10d import Reduce
from hetctl.comm.operation.views import as_bytes


def check_sparse(op: Any) -> None:
    """Raises ValueError for a reduction other than a sum or an average: where a rank has no entry, it has no say."""
    kind = getattr(op, "op", op)
    if kind not in (Reduce.SUM, Reduce.AVG):
        raise ValueError(f"sparse tensors can be reduced with SUM and AVG only, not with {kind.name}")


def sum_sparse(tensor: torch.Tensor, how: Reduction, collectives: Collectives, run: Run) -> None:
    """Give a sparse COO tensor the coalesced sum over all ranks, or their mean; shapes and dtypes are equal."""
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [int(c) for c in _gather(torch.tensor([indices.size(1)], device=values.device), collectives, None, run)]
    places = _gather(indices, collectives, [c * indices.size(0) for c in counts], run)
    each = math.prod(values.shape[1:])
    numbers = _gather(values, collectives, [c * each for c in counts], run)
    total = torch.zeros_like(mine)
    for count, place, number in zip(counts, places, numbers, strict=True):
        found = place.view(indices.size(0), count), number.view(count, *values.shape[1:])
        total = total + torch.sparse_coo_tensor(*found, size=mine.shape)
    total = total.coalesce()
    how.after(total.values(), collectives.layout.size)
    with torch.no_grad():  # a detached sparse tensor would be another one: it shares values, not their number
        tensor.copy_(total)


def _gather(data: torch.Tensor, collectives: Collectives, sizes: list[int] | None, run: Run) -> list[torch.Tensor]:
    """Every rank's flat `data`, of the sizes given or of this rank's own."""
    lengths = sizes or [data.numel()] * collectives.layout.size
    outs = [torch.empty(n, dtype=data.dtype, device=data.device) for n in lengths]
    at_once(collectives.all_gather([t.view(torch.uint8) for t in outs], as_bytes(data), run))
    return outs
