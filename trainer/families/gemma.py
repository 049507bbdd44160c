"""Gemma 2 and the text part of Gemma 3: norms around each part, scaled embeddings, GeGLU, windows in most layers."""

from __future__ import annotations

import math
from typing import Any

from hetctl.trainer.families.config_reader import ConfigReader
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.windows import read_windows, write_windows


def _scales(get: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_scale": math.sqrt(get.whole("hidden_size")),
        "attention_scale": get.positive("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": get.number("attn_logit_softcapping", 0.0),
        "logit_cap": get.number("final_logit_softcapping", 0.0),
    }


def _write(shape: Any) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round(shape.attention_scale**-2),
        "attn_logit_softcapping": shape.attention_cap or None,
        "final_logit_softcapping": shape.logit_cap or None,
        "attention_bias": shape.qkv_bias,
        **write_windows(shape.windows, shape.layers),
    }


def _read2(get: ConfigReader) -> dict[str, Any]:
    return {**_scales(get), **read_windows(get, lambda layer: layer % 2 == 0)}


def _read3(get: ConfigReader) -> dict[str, Any]:
    pattern = get.whole("sliding_window_pattern", 6)
    theta = get.positive("rope_local_base_freq", 10_000.0)
    return {"local_rope_theta": theta, **_scales(get), **read_windows(get, lambda layer: (layer + 1) % pattern != 0)}


def _write3(shape: Any) -> dict[str, Any]:
    return {**_write(shape), "rope_local_base_freq": shape.local_rope_theta}


_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "tie_word_embeddings": True}
_MUSTS = {"use_bidirectional_attention": False}
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    mlp_bias=False,
    norm="rms+1",
    norms="around",
    activations=("gelu_pytorch_tanh",),
    config_keys={"hidden_act": "hidden_activation"},
    config_defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    config_musts=_MUSTS,
    read=_read2,
    write=_write,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    mlp_bias=False,
    norm="rms+1",
    norms="around",
    qk_norm="head",
    activations=("gelu_pytorch_tanh",),
    config_keys={"hidden_act": "hidden_activation"},
    config_defaults={**_DEFAULTS, "rope_theta": 1_000_000.0},
    config_musts={**_MUSTS, "attn_logit_softcapping": None},
    read=_read3,
    write=_write3,
)
