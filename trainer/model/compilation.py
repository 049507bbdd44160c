"""torch.compile of blocks and loss: one compilation serves all blocks; where it fails, all runs eagerly, aloud."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hetctl.trainer.model.head_loss import IGNORED, fusible_loss_and_gradient
from hetctl.trainer.model.model import StageModel


def compile_model(model: StageModel, *, samples: int, seq_len: int, packing: bool = False) -> bool:
    """Compile every block, and try them forward and backward before anyone waits for this rank's first step.

    Returns whether the model is compiled now. The next step forgets the gradients that the trial leaves behind.
    """
    blocks = list(model.layers.values())
    for block in blocks:
        _compile(block, quantised=model.shape.quantised is not None)
    eager = model.loss_kernel
    if model.tensor.degree == 1:  # shared-out words take sums in the midst of the loss
        model.loss_kernel = torch.compile(fusible_loss_and_gradient, dynamic=False)
    try:
        _try(model, samples=samples, seq_len=seq_len, packing=packing)
    except Exception as error:  # whatever a compiler may raise
        for block in blocks:
            block._compiled_call_impl = None
            vars(block).pop("_dropping", None)
        model.loss_kernel = eager
        why = (str(error).splitlines() or [""])[0]
        warnings.warn(f"torch.compile failed, blocks run eagerly: {type(error).__name__}: {why}", stacklevel=2)
        return False
    return True


def _compile(block: Any, *, quantised: bool) -> None:
    """The whole block, or what its checkpoint computes again.

    A compiler that finds products with quantised weights inside a checkpoint may keep what they give all the same:
    torch 2.11 kept 1.25 GiB a block of Llama-8B for 16,384 tokens.
    """
    if quantised and block.recompute == "full":
        vars(block)["_dropping"] = torch.compile(block._dropping, dynamic=False)
    else:
        block.compile(dynamic=False)


def _try(model: StageModel, *, samples: int, seq_len: int, packing: bool) -> None:
    """The first two blocks, so that the second shows whether the first one's compilation serves it, and the loss."""
    device, dtype = next(model.parameters()).device, model.dtype
    x = torch.zeros((samples, seq_len, model.shape.hidden), dtype=dtype, device=device, requires_grad=True)
    documents = torch.zeros((samples, seq_len), dtype=torch.int64, device=device) if packing else None
    dropping = model.shape.adapters is not None and model.shape.adapters.dropout > 0
    draws = torch.zeros(samples, dtype=torch.int64, device=device) if dropping else None
    for number, block in list(enumerate(model.layers.values(), start=model.first))[:2]:
        model.before_unit(number + 1)
        y = block(x, *model.rotary(x, model.is_local(number), documents), documents, draws)
        model.before_backward(number + 1)
        y.backward(torch.zeros_like(y))
    if model.lm_head is not None:
        model.before_unit(model.shape.layers + 1)
        targets = torch.full((samples, seq_len), IGNORED, device=device)
        with torch.no_grad():
            logits = model.lm_head(x.detach()).flatten(0, 1)
            scale = torch.ones((), device=device) if dtype == torch.float16 else None
            model.loss_kernel(logits, targets.flatten(), scale)
