"""Model families: each is one row of `FAMILIES`, which says how it differs from Llama. No torch: planners ask too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hetctl.comm.contract.errors import ConfigError, nearest


@dataclass(frozen=True)
class Family:
    """A decoder-only transformer; what a row does not say is as in Llama."""

    model_type: str  # in config.json
    architecture: str = ""  # transformers' class, in config.json; empty: such models are planned, not trained
    qkv_bias: bool | None = None  # None: as attention_bias in config.json says
    out_bias: bool | None = None  # of the attention's output projection; None: the same
    gated: bool = True  # the MLP has a gate beside its up projection
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"  # LayerNorm has a bias
    learned_positions: int | None = None  # rows before the first position of a learned table; None: rotary
    activations: tuple[str, ...] = ("silu", "swish")  # of the MLP, by its names in config.json, the first is written
    config_keys: Mapping[str, str] = field(default_factory=dict)  # Llama's key in config.json -> this family's
    config_defaults: Mapping[str, Any] = field(default_factory=dict)  # by Llama's keys: what its config.json leaves out
    config_musts: Mapping[str, Any] = field(default_factory=dict)  # what changes its model unless it is left out or so
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
        Family(
            "opt",
            "OPTForCausalLM",
            qkv_bias=True,
            out_bias=True,
            gated=False,
            mlp_bias=True,
            norm="layer",
            learned_positions=2,
            activations=("relu",),
            config_keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
            config_defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
            config_musts={
                "do_layer_norm_before": True,
                "enable_bias": True,
                "layer_norm_elementwise_affine": True,
                "_remove_final_layer_norm": False,
            },
            tensor_names={
                "model.": "model.decoder.",
                "o_proj": "out_proj",
                "input_layernorm": "self_attn_layer_norm",
                "post_attention_layernorm": "final_layer_norm",
                "mlp.up_proj": "fc1",
                "mlp.down_proj": "fc2",
                "decoder.norm": "decoder.final_layer_norm",
            },
        ),
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
