"""Qwen 2, 2.5 and 3: windows from some layer on where asked for; queries and keys with biases, or behind norms."""

from __future__ import annotations

from typing import Any

from hetctl.trainer.families.config_reader import ConfigReader
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.windows import read_windows, write_windows


def _read(get: ConfigReader) -> dict[str, Any]:
    if not get.flag("use_sliding_window"):
        return {}
    first = get.whole("max_window_layers", 28)
    return read_windows(get, lambda layer: layer >= first)


def _write(shape: Any) -> dict[str, Any]:
    return {"use_sliding_window": bool(shape.windows), **write_windows(shape.windows, shape.layers)}


_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 32}
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    config_defaults=_DEFAULTS,
    read=_read,
    write=_write,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    mlp_bias=False,
    qk_norm="head",
    config_defaults={**_DEFAULTS, "head_dim": 128},
    read=_read,
    write=_write,
)
