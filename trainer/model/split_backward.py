"""Backward in two halves: gradients of inputs at once, those of projections' weights when the schedule has time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetctl.trainer.model.adapters import DOWN, MAGNITUDE, UP, Adapters
from hetctl.trainer.model.block_formats import Quantised, row_bytes
from hetctl.trainer.model.dropout import InputDropout
from hetctl.trainer.model.quantised import dequantise, quantised_linear
from hetctl.trainer.model.tensor_parallel import ALONE, TensorShare, leave


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
    """A linear layer whose weight gradient can be deferred, that an adapter may add to and bytes stand for."""

    deferred: WeightGradients | None = None
    adapters: Adapters | None = None
    quantised: Quantised | None = None
    adapted = True  # whether its adapter adds to it now, if it has one
    dropout: InputDropout | None = None
    draws: Tensor | None = None  # of the samples that its block computes; None: nothing is dropped

    def adapt(self, adapters: Adapters, name: str, *, low: int = 0) -> None:
        """Add an adapter's factors. They are linear as this layer is: parts of their product sum up as its own do.

        This rank's first value in is the layer's number `low`.
        """
        self.adapters = adapters
        self.add_module(DOWN, Projection(self.in_features, adapters.rank, bias=False))
        self.add_module(UP, Projection(adapters.rank, self.out_features, bias=False))
        if adapters.dora:
            self.register_parameter(MAGNITUDE, nn.Parameter(self.weight.new_empty(self.out_features)))
        self.dropout = InputDropout(adapters.dropout, name, low=low) if adapters.dropout else None

    def quantise(self, kind: Quantised) -> None:
        """Keep the weight as bytes from now on: it is frozen."""
        self.quantised = kind
        packed = torch.empty(self.out_features, row_bytes(kind, self.in_features), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor, tensor: TensorShare = ALONE) -> Tensor:
        """Where columns are shared out over a tensor group, parts are summed before magnitudes and the bias come.

        What an adapter reads may be dropped; with magnitudes it is dropped for the weight too, whose plain product
        then makes up for that beside them, as PEFT has it.
        """
        reads = x
        if self.dropout is not None and self.draws is not None and self.adapted:
            reads = x * self.dropout.mask(self.draws, x)
        if not self._has_magnitudes:
            return self._summed(x, reads, tensor)
        product = leave(self._base(reads) + self._adapter(reads), tensor)
        out = product * (self.get_parameter(MAGNITUDE) / self.row_norms(tensor))
        if reads is not x:
            out = out + leave(self._base(x - reads), tensor)
        return out if self.bias is None else out + self.bias

    def _summed(self, x: Tensor, reads: Tensor, tensor: TensorShare) -> Tensor:
        fused = self.bias if tensor.degree == 1 else None
        out = self._base(x, fused)
        if self.adapters is not None and self.adapted:
            out = out + self._adapter(reads)
        out = leave(out, tensor)
        return out if self.bias is None or fused is not None else out + self.bias

    @property
    def _has_magnitudes(self) -> bool:
        return self.adapters is not None and self.adapters.dora and self.adapted

    @torch.no_grad()
    def row_norms(self, tensor: TensorShare = ALONE) -> Tensor:
        """Of weight and adapter together, [values out]: constants to backward, as PEFT has it (section 4.3)."""
        assert self.adapters is not None
        down, up = (self.get_submodule(factor).get_parameter("weight") for factor in (DOWN, UP))
        # not as a plain product: selective recomputation would keep it, as large as the weight
        (both,) = torch.baddbmm(self.base_weight()[None], up[None], down[None], alpha=self.adapters.scale)
        norms = norms_of_rows(both)
        return (norms if tensor.degree == 1 else tensor.sum(norms.square()).sqrt()).to(both.dtype)

    def base_weight(self) -> Tensor:
        """The weight without its adapter, [values out, values in], in the precision of that."""
        if self.quantised is None:
            return self.weight
        like = self.get_submodule(DOWN).get_parameter("weight")
        return dequantise(self.weight, self.quantised, self.in_features, like.dtype)

    def _base(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` times the weight, plus a bias of this layer if given."""
        if self.quantised is not None:
            return quantised_linear(x, self.weight, bias, self.quantised)
        if self.deferred is None or not torch.is_grad_enabled() or not self.weight.requires_grad:
            return F.linear(x, self.weight, bias)
        needs = x if x.requires_grad else x.detach().requires_grad_()  # none before it: then no backward would come
        arrived: list[Tensor] = []
        kept = _Kept.apply(needs, self, arrived, bias is not None)  # type: ignore[no-untyped-call]
        out = F.linear(kept, self.weight.detach(), None if bias is None else bias.detach())
        out.register_hook(arrived.append)
        return out

    def _adapter(self, x: Tensor) -> Tensor:
        assert self.adapters is not None
        up: Tensor = self.get_submodule(UP)(self.get_submodule(DOWN)(x) * self.adapters.scale)
        return up


def norms_of_rows(weight: Tensor) -> Tensor:
    """[rows], in fp32 or better."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))
    return norms


class _Kept(torch.autograd.Function):
    """Hands on what a layer reads, and keeps it for the weight gradient until the product's own gradient, `arrived`, is
    there. Keeping comes before the product: what is computed again ends with what was kept last, so not with a product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Projection, arrived: list[Tensor], biased: bool) -> Tensor:
        ctx.layer, ctx.arrived, ctx.biased = layer, arrived, biased
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        layer, of_product, (x,) = ctx.layer, ctx.arrived.pop(), ctx.saved_tensors
        layer.deferred.put(layer.weight, x, of_product)
        if ctx.biased:
            layer.deferred.put(layer.bias, None, of_product)
        return gradient, None, None, None
