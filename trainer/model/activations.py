"""What becomes of activations between forward and backward: computed again, or kept on the host.

Copies to the host leave as each block ends, and are back before they are needed: on a device in pinned memory on a
stream of their own, beside the computation; on the CPU they are plain copies, the same path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hetctl.comm.operation.device import has_streams, module_of
from hetctl.trainer.model.memory_limits import NARROW

Recompute = Literal["none", "selective", "full"]
LEAST_BYTES = 64 << 10  # smaller tensors stay on a device: a copy costs more than they do
UNITS_UNDER_WAY = 2  # blocks whose copies to the host may be outstanding: more would hold their device memory
_KEPT = {  # matrix products, attention and sums over ranks: what selective recomputation keeps
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recomputing(call: Callable[..., Tensor], *inputs: Tensor | None, recompute: Recompute) -> Tensor:
    """What `call` returns, keeping for backward all it needs, or less of it and computing the rest again.

    It stands inside a block's forward, so that a compiled block compiles what is computed again as well.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return call(*inputs)
    more: dict[str, Any] = {}
    if recompute == "selective":
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    again: Tensor = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False, **more)
    return again


def _policy(context: Any, operator: Any, *inputs: Any, **__: Any) -> CheckpointPolicy:
    kept = operator in _KEPT and not (operator is torch.ops.aten.mm.default and _is_narrow(*inputs))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_narrow(left: Tensor, right: Tensor) -> bool:
    """Whether a product is that of an adapter's second factor: as large as the weight's, and made in no time."""
    return left.shape[1] <= NARROW and 4 * left.shape[1] <= right.shape[1]


class SavedTensor:
    """One saved tensor: on the device until its block ends, then on the host, on the device again when asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.device: Tensor | None = tensor
        self._device, self._size, self._stride = tensor.device, tensor.size(), tensor.stride()
        self._host: Tensor | None = None

    def to_host(self) -> None:
        """Begin the copy to the host (on the current stream); the device's copy goes when that is done."""
        assert self.device is not None
        on_device = not self.device.is_cpu
        self._host = torch.empty_strided(
            self._size, self._stride, dtype=self.device.dtype, device="cpu", pin_memory=on_device
        )
        self._host.copy_(self.device, non_blocking=True)
        if on_device:
            self.device.record_stream(module_of(self._device).current_stream())
        self.device = None

    def to_device(self) -> Tensor:
        """Begin the copy to the device (on the current stream), if it is not there."""
        if self.device is None:
            assert self._host is not None
            self.device = torch.empty_strided(
                self._size, self._stride, dtype=self._host.dtype, device=self._device
            ).copy_(self._host, non_blocking=True)
            self._host = None
        return self.device


class SavedBlock:
    """What one block saved in one forward pass; the block before it comes back while this one's backward runs."""

    def __init__(self, before: SavedBlock | None) -> None:
        self.before = before
        self.held: dict[tuple[object, ...], SavedTensor] = {}  # a tensor that is saved twice is kept once
        self.fetched: Any = None  # the event behind which all of it is on the device again


class HostActivations:
    """Saves activations of a stage's blocks on the host."""

    def __init__(self, device: torch.device, *, kept: Iterable[Tensor] = ()) -> None:
        """`kept` are tensors that stay where they are, with all their views: parameters."""
        self._streams, self._on_device = module_of(device), has_streams(device)
        self._least = LEAST_BYTES if self._on_device else 0
        self._out, self._back = (self._streams.Stream(device) if self._on_device else None for _ in range(2))
        self._leaving: list[Any] = []  # the events behind which blocks have left
        self._last: SavedBlock | None = None
        self._kept: set[int] = set()
        self.keep(*kept)

    def keep(self, *tensors: Tensor) -> None:
        """These stay where they are too, such as tables that all blocks share."""
        self._kept.update(_storage(t) for t in tensors)

    def begin(self) -> None:
        """A new forward pass: its first block has none before it."""
        self._last = None

    @contextmanager
    def unit(self) -> Iterator[None]:
        """What is saved inside is one block's."""
        unit = self._last = SavedBlock(self._last)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._pack(unit, tensor), lambda packed: self._unpack(unit, packed)
        ):
            yield
        self._send(unit)

    def _pack(self, unit: SavedBlock, tensor: Tensor) -> Tensor | SavedTensor:
        if not self._goes(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)
        if key not in unit.held:
            unit.held[key] = SavedTensor(tensor.detach())
        return unit.held[key]

    def _goes(self, tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or tensor.nbytes < self._least:
            return False
        return _storage(tensor) not in self._kept and _dense(tensor)

    def _send(self, unit: SavedBlock) -> None:
        """A block has ended: its activations leave."""
        if self._out is None:
            for held in unit.held.values():
                held.to_host()
            return
        if len(self._leaving) >= UNITS_UNDER_WAY:
            self._streams.current_stream().wait_event(self._leaving.pop(0))
        self._out.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._out):
            for held in unit.held.values():
                held.to_host()
            self._leaving.append(self._out.record_event())

    def _unpack(self, unit: SavedBlock, packed: Tensor | SavedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(unit)
        if unit.before is not None:
            self._fetch(unit.before)
            unit.before = None
        if unit.fetched is not None:
            self._streams.current_stream().wait_event(unit.fetched)
        tensor = packed.to_device()
        if self._on_device:
            tensor.record_stream(self._streams.current_stream())
        return tensor

    def _fetch(self, unit: SavedBlock) -> None:
        """Begin bringing a block's activations back."""
        if self._back is None:
            for held in unit.held.values():
                held.to_device()
        elif unit.held:
            self._back.wait_stream(self._out)
            with self._streams.stream(self._back):
                for held in unit.held.values():
                    held.to_device()
                unit.fetched = self._back.record_event()
        unit.held = {}  # from here on only the graph holds them, and lets go of each as it is used


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor lies in: the same for all its views, also while that is resized."""
    return int(tensor.untyped_storage()._cdata)


def _dense(tensor: Tensor) -> bool:
    """Whether every element has a place of its own, with no gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
