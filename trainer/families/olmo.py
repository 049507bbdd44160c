"""OLMo 2: norms behind attention and MLP, and over all queries and all keys of a token."""

from __future__ import annotations

from hetctl.trainer.families.family import Family

OLMO2 = Family("olmo2", "Olmo2ForCausalLM", mlp_bias=False, norms="after", qk_norm="whole")
