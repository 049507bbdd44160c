"""Mistral: Llama without biases; its first versions attend to a window in every layer."""

from __future__ import annotations

from hetctl.trainer.families.family import Family
from hetctl.trainer.families.windows import one_window, write_one_window

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    config_defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    read=one_window,
    write=write_one_window,
)
