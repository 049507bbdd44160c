"""torch.compile per block: one compilation serves all blocks of a stage; where it fails, blocks run eagerly, aloud."""

from __future__ import annotations

import warnings

import torch

from hetctl.trainer.model import StageModel


def compile_blocks(model: StageModel, *, samples: int, seq_len: int) -> bool:
    """Compile every block and try the first forward and backward, before anyone waits for this rank's first step.

    Returns whether blocks are compiled now. Gradients that the trial leaves behind are the caller's to forget.
    """
    blocks = list(model.layers.values())
    for block in blocks:
        block.compile(dynamic=False)
    like = next(blocks[0].parameters())
    x = torch.zeros((samples, seq_len, model.shape.hidden), dtype=like.dtype, device=like.device, requires_grad=True)
    try:
        for block in blocks[:2]:  # the second shows whether the first one's compilation serves it
            y = block(x, *model.rotary(x))
            y.backward(torch.zeros_like(y))
    except Exception as error:  # whatever a compiler may raise
        for block in blocks:
            block._compiled_call_impl = None
        warnings.warn(
            f"torch.compile failed, blocks run eagerly: {type(error).__name__}: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return False
    return True
