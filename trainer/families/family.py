"""What a model family is: how its decoder differs from Llama's, in what it computes and in its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hetctl.trainer.families.config_reader import ConfigReader

Norms = Literal["before", "after", "around"]
NORMS: Mapping[Norms, tuple[str, str, str, str]] = {  # before and after the attention, before and after the MLP
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A decoder-only transformer; what a row does not say is as in Llama."""

    model_type: str  # in config.json
    architecture: str = ""  # transformers' class, in config.json; empty: such models are planned, not trained
    qkv_bias: bool | None = None  # None: as attention_bias in config.json says
    out_bias: bool | None = None  # of the attention's output projection; None: the same
    mlp_bias: bool | None = None  # None: as mlp_bias in config.json says
    gated: bool = True  # the MLP has a gate beside its up projection
    norm: Literal["rms", "rms+1", "layer"] = "rms"  # "rms+1" multiplies by 1 + weight; "layer" has a bias
    norms: Norms = "before"  # where a block has them, by the names in NORMS
    qk_norm: Literal["", "head", "whole"] = ""  # of queries and keys: each head's by itself, or all heads' values
    partly_rotated: bool = False  # of a head's values the first may turn with their position, the others not
    learned_positions: int | None = None  # rows before the first position of a learned table; None: rotary
    activations: tuple[str, ...] = ("silu", "swish")  # of the MLP, by its names in config.json, the first is written
    config_keys: Mapping[str, str] = field(default_factory=dict)  # Llama's key in config.json -> this family's
    config_defaults: Mapping[str, Any] = field(default_factory=dict)  # by Llama's keys: what its config.json leaves out
    config_musts: Mapping[str, Any] = field(default_factory=dict)  # what changes its model unless it is left out or so
    read: Callable[[ConfigReader], Mapping[str, Any]] = _nothing  # further fields of the shape, from its config.json
    write: Callable[[Any], Mapping[str, Any]] = _nothing  # further keys of its config.json, from the shape
    tensor_names: Mapping[str, str] = field(default_factory=dict)  # part of Llama's tensor names -> of this family's
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # its matrix -> those of Llama, rows below rows
    block: Callable[[], Any] | None = None  # gives the class of its blocks, where that is not `model.Block`

    @property
    def title(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")

    @cached_property
    def block_norms(self) -> tuple[str, ...]:
        """The names of a block's norms of hidden states."""
        return tuple(name for name in NORMS[self.norms] if name)

    def tensor_name(self, name: str) -> str:
        """What the family's files call a parameter, which goes by Llama's name everywhere else."""
        for ours, theirs in self.tensor_names.items():
            name = name.replace(ours, theirs)
        return name

    def parts(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The tensor in its files that holds a parameter, and the parameters in it by our names, row by row."""
        for whole, parts in self.joined.items():
            for part in parts:
                if f".{part}." in name:
                    names = tuple(name.replace(part, other) for other in parts)
                    return self.tensor_name(name.replace(part, whole)), names
        return self.tensor_name(name), (name,)
