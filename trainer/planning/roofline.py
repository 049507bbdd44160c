"""How fast layers of one shape run on a device of which only a sustained figure is known: matrix products, attention,
and what is only moved.

A sustained figure is of the whole of one model (`REFERENCE`): its rate in matrix products follows, and other shapes
spend other shares of their time on the rest. So small models and long samples reach less of the peak.
"""

from __future__ import annotations

from hetctl.trainer.model.shapes import SHAPES, ModelShape

REFERENCE, REFERENCE_LENGTH = SHAPES["llama-8b"], 4096  # what published figures of the hardware table are of
# Fitted to the fitted half of tests/published/llm-foundry-*.yaml (A100 and H100, 125M to 70B, 512 to 32768 tokens)
ATTENTION = 3.0  # times longer than a matrix product's that attention's FLOPs (causal, fused) take
PASSES = 2.4  # times that the values of `block_bytes` are moved: casts between precisions, biases, dropout


def block_flops(shape: ModelShape, seq_len: int) -> float:
    """Forward FLOPs of one block per token, attention's weighted by how much slower they are."""
    weights = 2.0 * (shape.attention_parameters + shape.mlp_parameters)
    return weights + ATTENTION * (shape.block_flops(seq_len) - weights)


def block_bytes(shape: ModelShape, width: int, tensor: int = 1) -> float:
    """Bytes per token that one block's norms, sums and activations read and write in forward, eagerly.

    Norms (in, out) and two residual sums (in, in, out) on every rank of a tensor group; of what the group shares:
    queries and keys turned in place, and the activation, with its gate (in, in, out) or without (in, out).
    """
    whole = 2 * shape.block_norms * shape.hidden + 2 * 3 * shape.hidden
    shared = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + (5 if shape.gated else 2) * shape.intermediate
    return PASSES * width * (whole + shared / tensor)


def head_bytes(shape: ModelShape, width: int, tensor: int = 1) -> float:
    """Bytes per token of the loss in forward: logits written, read, and in fp32 once written and twice read."""
    return shape.vocab * (2 * width + 3 * 4) / tensor


def matmul_flops_per_s(sustained: float, memory_bytes_per_s: float, width: int) -> float:
    """The rate in matrix products with which a device reaches so many FLOPS on the whole of the reference."""
    s, length = REFERENCE, REFERENCE_LENGTH
    seconds = s.token_flops(length) / 3 / sustained
    moved = (s.layers * block_bytes(s, width) + head_bytes(s, width)) / memory_bytes_per_s
    return (s.layers * block_flops(s, length) + s.head_flops()) / max(seconds - moved, 0.2 * seconds)
