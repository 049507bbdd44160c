"""Llama 1 to 3 and what is built alike (SmolLM and SmolLM2, many others): the family that others differ from."""

from __future__ import annotations

from hetctl.trainer.families.family import Family

LLAMA = Family("llama", "LlamaForCausalLM")
