"""Activations computed again in backward: a whole block's, or only what is cheap to make again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]
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


def recomputing(call: Callable[..., Tensor], *inputs: Tensor, recompute: Recompute) -> Tensor:
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


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
