"""Small random models of every family by transformers, in full double precision, to hold ours against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
OPT = {"ffn_dim": 48, "num_key_value_heads": 4, "word_embed_proj_dim": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2, tied, yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "opt, tied": ("OPT", OPT),
    "opt": ("OPT", {**OPT, "tie_word_embeddings": False}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "qwen2, windows": ("Qwen2", {"rope_parameters": ROPE, **WINDOWS}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases, windows": ("Qwen3", {"head_dim": 16, "attention_bias": True, **WINDOWS}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2, no caps, untied": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma2, caps that bind": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "gemma3, stretched": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 2.0,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {"sliding_window": 7}),
    "phi4, partly rotated": (
        "Phi3",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
    ),
    "phi3, longrope, short": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3, longrope, long": (
        "Phi3",
        {
            "rope_parameters": {**LONG, "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 8,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3", {"rope_parameters": ROPE}),
    "smollm3, windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 5, "mlp_bias": True},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
            "logits_scaling": 6.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}


@contextmanager
def in_double() -> Iterator[None]:
    """transformers computes norms, positions and softmax in fp32 whatever the model is in: here they stay in fp64."""
    to, as_float, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def wide(kind: Any) -> Any:
        return torch.float64 if kind is torch.float32 else kind

    def to_wide(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        return to(self, *map(wide, args), **{k: wide(v) for k, v in more.items()})

    def softmax_wide(x: torch.Tensor, dim: int | None = None, dtype: Any = None) -> torch.Tensor:
        return softmax(x, dim=dim, dtype=wide(dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to_wide)
        patch.setattr(torch.Tensor, "float", lambda self: as_float(self) if self.is_cuda else to(self, torch.float64))
        patch.setattr(torch.nn.functional, "softmax", softmax_wide)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def theirs(name: str, seed: int = 0) -> Any:
    """A model by transformers, its weights random in every place. Made and run under `in_double`."""
    import transformers

    family, more = VARIANTS[name]
    torch.manual_seed(seed)
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
