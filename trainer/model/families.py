"""Model families: each is one row of `FAMILIES`, which says how it differs from Llama. No torch: planners ask too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.comm.contract.errors import ConfigError, nearest


@dataclass(frozen=True)
class Family:
    """A decoder-only transformer with rotary positions; what a row does not say is as in Llama."""

    model_type: str  # in config.json
    architecture: str = ""  # transformers' class, in config.json; empty: such models are planned, not trained
    qkv_bias: bool | None = None  # None: as attention_bias in config.json says
    out_bias: bool | None = None  # of the attention's output projection; None: the same
    gated: bool = True  # the MLP has a gate beside its up projection
    activations: tuple[str, ...] = ("silu", "swish")  # of the MLP, by its names in config.json, the first is written
    config_keys: Mapping[str, str] = field(default_factory=dict)  # Llama's key in config.json -> this family's
    tensor_names: Mapping[str, str] = field(default_factory=dict)  # part of Llama's tensor names -> of this family's
    block: Callable[[], Any] | None = None  # gives the class of its blocks, where that is not `model.Block`

    @property
    def title(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")

    def tensor_name(self, name: str) -> str:
        """What the family's files call a parameter, which goes by Llama's name everywhere else."""
        for ours, theirs in self.tensor_names.items():
            name = name.replace(ours, theirs)
        return name


LLAMA = Family("llama", "LlamaForCausalLM")
FAMILIES = {
    f.model_type: f
    for f in (
        LLAMA,
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, out_bias=False),
        Family("gpt", gated=False),
    )
}


def family_of(model_type: str) -> Family:
    """The row of this name. Raises ConfigError."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model family '{model_type}' is not known", hint=nearest(model_type, FAMILIES))
    return FAMILIES[model_type]


def trained_families() -> list[Family]:
    """Those that hetctl's model computes."""
    return [f for f in FAMILIES.values() if f.architecture]
