"""The last layer and its loss in one: the LM head's product, cross entropy, and their gradients, by chunks of tokens.

The gradient of the logits is made while they exist, so they are never kept for backward, and never twice in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetctl.trainer.model.memory_limits import CHUNK_BYTES

IGNORED = -100  # a target that carries no loss

LossKernel = Callable[..., tuple[Tensor, Tensor, Tensor]]  # of logits, targets, and a scale of the gradient or None
Weigh = Callable[[Tensor], Tensor]  # token losses [batch, seq] -> what each weighs


@dataclass(frozen=True)
class Bend:
    """How the head's products become logits: x / divisor, then c tanh(x / c) where there is a cap c."""

    divisor: float = 1.0
    cap: float = 0.0

    def __call__(self, products: Tensor) -> Tensor:
        logits = products if self.divisor == 1.0 else products / self.divisor
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The products' gradient, from that of the logits which they became."""
        if self.cap:
            gradient = gradient * (1.0 - (logits / self.cap).square())
        return gradient if self.divisor == 1.0 else gradient / self.divisor


STRAIGHT = Bend()


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float,
    kernel: LossKernel | None = None,
    bend: Bend = STRAIGHT,
    total: Callable[[Tensor], Tensor] | None = None,
    words: int | None = None,
    weigh: Weigh | None = None,
) -> tuple[Tensor, Tensor]:
    """(scaled loss to call backward on, token losses) of [batch, seq, hidden] and targets [batch, seq].

    The scaled loss is the sum of the token losses, each times what it weighs (`weigh`; None: 1) and `scale`. It must be
    what backward starts from: its gradients are made here, with nothing after them. The scale goes into them as
    rows, in fp16 before they are rounded: it would lose the probabilities of most words otherwise.
    Where the words are shared out among ranks, `kernel` knows of it, `total` sums hidden gradients over them, and
    `words` is the most that any of them has (so that all cut alike).
    """
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    chunks = _chunks(flat, wanted, words or weight.shape[0])
    if not torch.is_grad_enabled():
        loss: Callable[..., tuple[Tensor, ...]] = _pieces
        if total is not None and kernel is not None:
            loss = partial(kernel, scale=None)
        losses = torch.cat([loss(bend(h @ weight.t()), t)[0] for h, t in chunks]).view_as(targets)
        return losses.sum(), losses
    losses = torch.empty_like(targets, dtype=widened(weight.dtype))
    made = (chunks, losses, scale, kernel or loss_and_gradient, bend, total, weigh)
    scaled: Tensor = _HeadLoss.apply(flat, weight, *made)  # type: ignore[no-untyped-call]
    return scaled, losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        chunks: Any,
        losses: Tensor,
        scale: float,
        kernel: LossKernel,
        bend: Bend,
        sum_over: Any,
        weigh: Weigh | None,
    ) -> Tensor:
        """Fills `losses` [batch, seq]."""
        wide, early, late = widened(weight.dtype), None, scale
        if weight.dtype == torch.float16:
            early, late = losses.new_full((), scale), 1.0  # a tensor, so that a compiled kernel is not of one value
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        start = 0
        for h, t in chunks:
            logits = bend(h @ weight.t())
            loss, grad, valid = kernel(logits, t, early)
            grad = bend.backward(grad, logits)
            del logits  # before the products below need room
            losses.view(-1)[start : start + len(h)] = loss
            rows = valid.to(h.dtype).unsqueeze(1) * late  # the scale, and nothing for ignored targets
            torch.mul(grad @ weight, rows, out=grad_hidden[start : start + len(h)])
            start += len(h)
            if ctx.needs_input_grad[1]:
                product = grad.t() @ (h * rows)
                if len(h) < len(hidden):
                    product = product.to(wide) if grad_weight is None else grad_weight.add_(product)
                grad_weight = product
            del grad  # as above
        if sum_over is not None:
            grad_hidden = sum_over(grad_hidden)
        weights = losses.new_ones(()) if weigh is None else weigh(losses)
        if weigh is not None:
            assert grad_weight is None, "weights are known once the gradients of a head are made"
            grad_hidden *= weights.flatten().unsqueeze(1)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return (losses * weights).sum() * scale

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, *(None for _ in range(7))


def loss_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(token losses, softmax minus one-hot in the logits' precision, times `scale` if any, which targets count)."""
    loss, logs, safe, valid = _pieces(logits, targets)
    wide, one = logs.exp_(), logs.new_ones(())
    if scale is not None:
        wide, one = wide.mul_(scale), scale
    grad = wide.to(logits.dtype)
    grad.scatter_add_(1, safe, -one.to(grad.dtype).expand_as(safe))
    return loss, grad, valid


def fusible_loss_and_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same as one expression per output, for a compiler to fuse."""
    loss, logs, safe, valid = _pieces(logits, targets)
    classes = torch.arange(logits.shape[1], device=logits.device)
    grad = logs.exp() - (classes.unsqueeze(0) == safe).to(logs.dtype)
    return loss, (grad if scale is None else grad * scale).to(logits.dtype), valid


def _pieces(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    valid = targets != IGNORED
    safe = targets.clamp(min=0).unsqueeze(1)
    logs = F.log_softmax(logits, dim=-1, dtype=widened(logits.dtype))
    loss = -(logs.gather(1, safe).squeeze(1) * valid)
    return loss, logs, safe, valid


def _chunks(hidden: Tensor, targets: Tensor, words: int) -> list[tuple[Tensor, Tensor]]:
    size = max(1, CHUNK_BYTES // (4 * words))
    return list(zip(hidden.split(size), targets.split(size), strict=True))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums over many values are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
