"""Phi-3 and Phi-4: Llama whose files hold queries, keys and values in one matrix, and gate and up in another."""

from __future__ import annotations

from typing import Any

from hetctl.trainer.families.family import Family
from hetctl.trainer.families.windows import one_window, write_one_window


def _write(shape: Any) -> dict[str, Any]:
    stretched = shape.rope_scaling
    original = {"original_max_position_embeddings": stretched.original_max_seq_len} if stretched else {}
    return {**write_one_window(shape), **original, "pad_token_id": None}  # its usual one needs a large vocabulary


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    partly_rotated=True,
    read=one_window,
    write=_write,
    joined={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
