"""Granite 3: Llama with embeddings, residuals, attention and logits scaled by numbers of config.json."""

from __future__ import annotations

from typing import Any

from hetctl.trainer.families.config_reader import ConfigReader
from hetctl.trainer.families.family import Family

_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}


def _read(get: ConfigReader) -> dict[str, Any]:
    return {field: get.positive(key, 1.0) for field, key in _SCALES.items()}


def _write(shape: Any) -> dict[str, Any]:
    return {key: getattr(shape, field) for field, key in _SCALES.items()}


GRANITE = Family("granite", "GraniteForCausalLM", read=_read, write=_write)
