"""Backward in two halves: gradients of inputs at once, those of projections' weights when the schedule has time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetctl.trainer.model.adapters import DOWN, UP, Adapters
from hetctl.trainer.model.tensor_parallel import TensorShare, leave


class WeightGradients:
    """Weight gradients deferred: what each needs is kept from its backward until `run`."""

    def __init__(self, done: Callable[[nn.Parameter], None]) -> None:
        """`done` is called with each parameter whose `grad` has just been made."""
        self._done = done
        self._open: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []

    def put(self, parameter: nn.Parameter, x: Tensor | None, gradient: Tensor) -> None:
        """Keep the factors of a gradient; without `x` it is the sum over rows of `gradient` (a bias)."""
        self._open.append((parameter, x, gradient))

    def take(self) -> list[tuple[nn.Parameter, Tensor | None, Tensor]]:
        """What one backward has deferred."""
        taken, self._open = self._open, []
        return taken

    @torch.no_grad()
    def run(self, taken: list[tuple[nn.Parameter, Tensor | None, Tensor]]) -> None:
        """Make the gradients that were deferred, in the order of backward, letting go of each one's factors."""
        for number, (parameter, x, gradient) in enumerate(taken):
            rows = gradient.flatten(0, -2)
            parameter.grad = rows.sum(0) if x is None else rows.t() @ x.flatten(0, -2)
            self._done(parameter)
            taken[number] = (parameter, None, gradient.new_empty(0))


class Projection(nn.Linear):
    """A linear layer whose weight gradient can be deferred, and that an adapter may add to."""

    deferred: WeightGradients | None = None
    adapters: Adapters | None = None

    def adapt(self, adapters: Adapters) -> None:
        """Add an adapter's factors. They are linear as this layer is: parts of their product sum up as its own do."""
        self.adapters = adapters
        self.add_module(DOWN, Projection(self.in_features, adapters.rank, bias=False))
        self.add_module(UP, Projection(adapters.rank, self.out_features, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` times the weight (and the adapter's), plus a bias of this layer if given."""
        out: Tensor
        if self.deferred is None or not torch.is_grad_enabled() or not self.weight.requires_grad:
            out = F.linear(x, self.weight, bias)
        else:
            needs = x if x.requires_grad else x.detach().requires_grad_()  # none before it: then no backward would come
            out = _Split.apply(needs, self, bias is not None)  # type: ignore[no-untyped-call]
        if self.adapters is None:
            return out
        down: Tensor = self.get_submodule(DOWN)(x)
        up: Tensor = self.get_submodule(UP)(down * self.adapters.scale)
        return out + up


def summed_linear(layer: Projection, x: Tensor, tensor: TensorShare) -> Tensor:
    """A projection whose columns are shared out: parts are summed over the tensor group, then the bias is added."""
    if tensor.degree == 1:
        whole: Tensor = layer(x)
        return whole
    out = leave(layer.product(x), tensor)
    return out if layer.bias is None else out + layer.bias


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Projection, biased: bool) -> Tensor:
        ctx.layer, ctx.biased = layer, biased
        ctx.save_for_backward(x)
        return F.linear(x, layer.weight, layer.bias if biased else None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layer, deferred = ctx.layer, ctx.layer.deferred
        (x,) = ctx.saved_tensors
        deferred.put(layer.weight, x, gradient)
        if ctx.biased:
            deferred.put(layer.bias, None, gradient)
        return gradient @ layer.weight, None, None
