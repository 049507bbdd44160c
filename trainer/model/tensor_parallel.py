"""Tensor parallelism: how the ranks of one host compute every layer together, and the sums that takes.

Each rank of a group has the same hidden states and its own part of every large matrix (`tensor_cuts.py`). What a
block adds to them is summed over the group forward, the gradient of what it reads backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hetctl.trainer.model.head_loss import IGNORED, widened
from hetctl.trainer.model.sample_shares import share


@dataclass(frozen=True)
class TensorShare:
    """This rank's place in its tensor group."""

    degree: int = 1
    index: int = 0
    group: Any = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, a new tensor; an operation that compilers know."""
        total: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group.group_name)
        total = torch.ops._c10d_functional.wait_tensor(total)
        return total

    def gather_(self, whole: Tensor) -> None:
        """Fill a contiguous tensor of which each rank has its equal part, in rank order."""
        flat = whole.view(-1)
        each = flat.numel() // self.degree
        mine = flat[self.index * each : (self.index + 1) * each]
        dist.all_gather(list(flat.split(each)), mine.clone(), group=self.group)


ALONE = TensorShare()


def enter(x: Tensor, tensor: TensorShare) -> Tensor:
    """`x` as the group's ranks read it: unchanged, its gradient summed over them."""
    return x if tensor.degree == 1 else _Enter.apply(x, tensor)  # type: ignore[no-untyped-call]


def leave(x: Tensor, tensor: TensorShare) -> Tensor:
    """The sum of what the group's ranks made; its gradient goes to each as it is."""
    return x if tensor.degree == 1 else _Leave.apply(x, tensor)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorShare) -> Tensor:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.sum(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorShare) -> Tensor:
        return tensor.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def embed(tokens: Tensor, table: Tensor, *, vocabulary: int, tensor: TensorShare) -> Tensor:
    """Rows of a table of which this rank has its share of the words; tokens [batch, seq]."""
    if tensor.degree == 1:
        return F.embedding(tokens, table)
    low, high = share(vocabulary, tensor.degree, tensor.index)
    mine = (tokens >= low) & (tokens < high)
    rows = F.embedding((tokens - low).clamp(0, high - low - 1), table)
    return leave(rows * mine.unsqueeze(-1).to(rows.dtype), tensor)


class SharedVocabulary:
    """The loss kernel (see headloss) of logits whose words are shared out among a tensor group."""

    def __init__(self, vocabulary: int, tensor: TensorShare) -> None:
        self.tensor = tensor
        self.low, self.high = share(vocabulary, tensor.degree, tensor.index)

    def __call__(self, logits: Tensor, targets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(token losses over all words, this rank's columns of softmax minus one-hot, which targets count)."""
        wide = logits.to(widened(logits.dtype))
        top = wide.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tensor.group)
        wide = wide - top.unsqueeze(1)
        valid = targets != IGNORED
        mine = ((targets >= self.low) & (targets < self.high)).to(wide.dtype)
        safe = (targets - self.low).clamp(0, self.high - self.low - 1).unsqueeze(1)
        wanted = wide.gather(1, safe).squeeze(1) * mine
        exps = wide.exp_()
        sums, wanted = self.tensor.sum(torch.stack((exps.sum(1), wanted)))
        loss = (sums.log() - wanted) * valid
        if scale is not None:
            sums, mine = sums / scale, mine * scale
        grad = (exps / sums.unsqueeze(1)).to(logits.dtype)
        grad.scatter_add_(1, safe, -mine.to(grad.dtype).unsqueeze(1))
        return loss, grad, valid
