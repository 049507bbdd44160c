"""The model families that hetctl knows, by their `model_type` in config.json."""

from __future__ import annotations

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.gemma import GEMMA2, GEMMA3
from hetctl.trainer.families.gpt import GPT, OPT
from hetctl.trainer.families.granite import GRANITE
from hetctl.trainer.families.llama import LLAMA
from hetctl.trainer.families.mistral import MISTRAL
from hetctl.trainer.families.olmo import OLMO2
from hetctl.trainer.families.phi import PHI3
from hetctl.trainer.families.qwen import QWEN2, QWEN3
from hetctl.trainer.families.smollm import SMOLLM3

ROWS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3, GRANITE, OPT, GPT)
FAMILIES = {family.model_type: family for family in ROWS}


def family_of(model_type: str) -> Family:
    """The row of this name. Raises ConfigError."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model family '{model_type}' is not known", hint=nearest(model_type, FAMILIES))
    return FAMILIES[model_type]


def trained_families() -> list[Family]:
    """Those that hetctl's model computes."""
    return [f for f in FAMILIES.values() if f.architecture]
