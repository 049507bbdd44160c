"""Reduce operations in two halves: what the native library does inside an island, what torch does between islands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.bridge.staging import Combine
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import HOST
from hetctl.comm.operation.work import Reduce

_COMBINE: dict[Any, Combine] = {
    Reduce.SUM: torch.Tensor.add_,
    Reduce.PRODUCT: torch.Tensor.mul_,
    Reduce.MIN: lambda target, other: torch.minimum(target, other, out=target),
    Reduce.MAX: lambda target, other: torch.maximum(target, other, out=target),
    Reduce.BAND: torch.Tensor.bitwise_and_,
    Reduce.BOR: torch.Tensor.bitwise_or_,
    Reduce.BXOR: torch.Tensor.bitwise_xor_,
}
_BITWISE = (Reduce.BAND, Reduce.BOR, Reduce.BXOR)
_SUMS = (Reduce.SUM, Reduce.AVG, Reduce.PREMUL_SUM)
_ON_HOST = {  # what gloo reduces, and int16, which goes as int32
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
}


@dataclass(frozen=True)
class Reduction:
    """One reduce operation: scale the input, reduce natively, combine across islands, divide the result."""

    native: Any  # the ReduceOp that native libraries get
    combine: Combine
    scale: Any = None  # a factor (number or tensor) for the input: pre-multiplied sums
    mean: bool = False

    def before(self, data: torch.Tensor) -> None:
        """Scale what is about to be reduced, in place."""
        if self.scale is not None:
            data.mul_(self.scale)

    def after(self, data: torch.Tensor, count: int) -> None:
        """Turn a sum over `count` ranks into what was asked for, in place."""
        if not self.mean:
            return
        if data.is_floating_point() or data.is_complex():
            data.div_(count)
        else:
            data.div_(count, rounding_mode="trunc")


def reduction(op: Any) -> Reduction:
    """The two halves of a torch ReduceOp. Raises ConfigError for one that is unknown."""
    kind = getattr(op, "op", op)
    if kind == Reduce.AVG:
        return Reduction(dist.ReduceOp.SUM, torch.Tensor.add_, mean=True)
    if kind == Reduce.PREMUL_SUM:
        return Reduction(dist.ReduceOp.SUM, torch.Tensor.add_, scale=_factor(op))
    if kind not in _COMBINE:
        raise ConfigError(f"the reduce operation {kind} is not known to the 'het' back end")
    return Reduction(dist.ReduceOp(kind), _COMBINE[kind])


def check(op: Any, data: torch.Tensor, *, alone: bool, device_types: frozenset[str]) -> None:
    """Raise TypeError where not every part of a reduction can be done; `alone`: no island has two ranks.

    Said before anything is sent, and by all ranks alike, it costs the program an exception and not the group: where
    ranks compute on unlike `device_types`, what any of their libraries lacks is refused by all of them.
    """
    kind = getattr(op, "op", op)
    types = device_types if len(device_types) > 1 else [data.device.type]
    if reason := _refusal(kind, op, data) or _native_refusal(kind, data.dtype, alone=alone, types=types):
        dtype = str(data.dtype).removeprefix("torch.")
        raise TypeError(f"{dtype} tensors cannot be reduced with {kind.name}: {reason}")


def _refusal(kind: Any, op: Any, data: torch.Tensor) -> str:
    """Why torch could not combine, scale or divide between islands; '' where it can."""
    if kind in _BITWISE and (data.is_floating_point() or data.is_complex()):
        return "only whole numbers have bits to combine"
    if data.is_complex() and kind not in _SUMS:
        return "complex numbers can only be summed"
    if data.dtype == torch.bool and kind == Reduce.AVG:
        return "truth values have no average"
    if kind == Reduce.PREMUL_SUM and not torch.can_cast(torch.result_type(data, _factor(op)), data.dtype):
        return "the products with the factor are of another type"
    return ""


def _native_refusal(kind: Any, dtype: torch.dtype, *, alone: bool, types: Collection[str]) -> str:
    """Why a native library could not; of devices' libraries only what all of them refuse is known."""
    if HOST in types and dtype not in _ON_HOST:
        return "gloo does not know the type"
    return "" if alone or kind not in _BITWISE or set(types) == {HOST} else "the libraries of devices combine no bits"


def _factor(op: Any) -> Any:
    """The factor of a pre-multiplied sum: torch shows it only in the operation's pickled state."""
    return op.__getstate__()[1]
