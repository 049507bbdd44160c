"""Tensors as programs hand them in, as the flat contiguous memory that collectives work on, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetctl.comm.operation.device import module_of
from hetctl.comm.operation.work import HetWork, OperationDeadline


def may_write(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[object]:
    """Inference mode for threads of this back end where a program made any of these in it: it counts by thread."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else contextlib.nullcontext()


class Flat:
    """A tensor as a flat contiguous one; what was changed is copied back where memory is not shared."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = memory_of(tensor)
        self._shared = is_plain(self._tensor)
        self.values = _flat(self._tensor)

    def put_back(self) -> None:
        if not self._shared:
            self._tensor.copy_(self.values.view(self._tensor.shape))
            used_here(self.values)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same values out of autograd's sight: what is written here it does not count, as it does not natively.

    A block of a split, say, could not be used again after a counted write.
    """
    return tensor.data


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is exactly its values in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor contiguous in memory, detached; the tensor itself where it is so already."""
    values = memory_of(tensor)
    return values if is_plain(values) else values.resolve_conj().resolve_neg().contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same, flat. (One element may have any stride, which views as another type refuse.)"""
    values = plain(tensor).view(-1)
    return values.as_strided(values.shape, (1,))


def used_here(scratch: torch.Tensor) -> None:
    """Scratch of a first half is read by the second one, on another stream: it may not be handed out before that."""
    if not scratch.is_cpu:
        scratch.record_stream(module_of(scratch.device).current_stream(scratch.device))


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in fresh flat memory."""
    return plain(tensor).reshape(-1).clone()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as flat bytes."""
    return _flat(tensor).view(torch.uint8)


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Fresh flat bytes for the values of a tensor."""
    return torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=tensor.device)


def fill(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a tensor the values that flat bytes hold."""
    memory_of(tensor).copy_(data.view(tensor.dtype).view(tensor.shape))
    used_here(data)


def rows(tensor: torch.Tensor, splits: Sequence[int], parts: int) -> list[torch.Tensor]:
    """Consecutive rows of dimension 0 for each rank; equal counts where no splits are given.

    Raises ValueError as torch does when the rows cannot be shared out like that.
    """
    length = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if length % parts:
            raise ValueError(f"Tensor's dim 0 ({length}) does not divide equally across group size {parts}")
        splits = [length // parts] * parts
    if sum(splits) != length:
        raise ValueError(f"Split sizes {list(splits)} don't match total dim 0 size {length}")
    return list(tensor.split(list(splits)))


class Returning(HetWork):
    """A receive into scratch memory whose values go to the program's own tensor at the end."""

    def __init__(self, what: str, target: torch.Tensor, scratch: torch.Tensor, deadline: OperationDeadline) -> None:
        super().__init__(what, [target], deadline=deadline)
        self._target, self._scratch = memory_of(target), scratch

    def finish(self, *, ready: Any = None, error: BaseException | None = None) -> None:
        with may_write([self._target]):
            if error is None and ready is None:
                self._target.copy_(self._scratch.view(self._target.shape))
            elif error is None:
                ready = self._copy_behind(ready)
        super().finish(ready=ready, error=error)

    def _copy_behind(self, ready: Any) -> Any:
        streams = module_of(self._target.device)
        stream, event = streams.Stream(self._target.device), streams.Event()
        with streams.stream(stream):
            stream.wait_event(ready)
            self._target.copy_(self._scratch.view(self._target.shape), non_blocking=True)
            event.record(stream)
        self._target.record_stream(stream)
        return event
