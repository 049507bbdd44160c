"""What `model.name` means: a known shape, a Hugging Face `config.json` (read, and written back), weights to start from.

No torch: the launcher's side asks before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.files import parse_json, read_text
from hetctl.comm.contract.units import MiB
from hetctl.trainer.families.config_reader import ConfigReader
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.registry import family_of, trained_families
from hetctl.trainer.families.windows import FULL, SLIDING
from hetctl.trainer.model.shapes import SHAPES, ModelShape, RopeScaling

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAFETENSORS = ".safetensors"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def find_shape(name: str) -> ModelShape:
    """A shape by its name or from a Hugging Face `config.json` (the file or its folder). Raises ConfigError."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"'{name}' is neither a model hetctl knows nor a config.json", hint=nearest(name, SHAPES))
    return shape_from_config(read_config(path), where=str(path))


def read_config(path: Path) -> Any:
    """The JSON of a `config.json`. Raises ConfigError."""
    try:
        return parse_json(read_text(path, what="model config", max_bytes=MiB))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def shape_from_config(config: object, *, where: str) -> ModelShape:
    """The shape a Hugging Face config describes. Raises ConfigError for what hetctl's model does not compute."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: a model config is a JSON object")
    family = _family(config.get("model_type"), where)
    config = {**{family.config_keys.get(k, k): v for k, v in family.config_defaults.items()}, **config}
    get = ConfigReader(config, where, family.config_keys)
    _refuse_variants(config, get, family)
    biased = get.flag("attention_bias")
    rope = _rope(config, where, get, family)
    shape = ModelShape(
        name=str(config.get("_name_or_path") or Path(where).parent.name or family.model_type),
        family=family.model_type,
        layers=get.whole("num_hidden_layers"),
        hidden=get.whole("hidden_size"),
        heads=get.whole("num_attention_heads"),
        kv_heads=get.whole("num_key_value_heads", get.whole("num_attention_heads")),
        intermediate=get.whole("intermediate_size"),
        vocab=get.whole("vocab_size"),
        head_dim=get.whole("head_dim", 0),
        max_seq_len=get.whole("max_position_embeddings", 2048),
        rms_eps=get.number("rms_norm_eps", 1e-6),
        tied_embeddings=get.flag("tie_word_embeddings"),
        qkv_bias=biased if family.qkv_bias is None else family.qkv_bias,
        out_bias=biased if family.out_bias is None else family.out_bias,
        mlp_bias=get.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        **{**family.read(get), **rope},
    )
    shape.validate()
    return shape


def config_of(shape: ModelShape, *, dtype: str) -> dict[str, Any]:
    """A `config.json` that Hugging Face's transformers (4 and 5) reads as this shape."""
    family = family_of(shape.family)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_seq_len,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": family.activations[0],
        "torch_dtype": dtype,
    }
    if family.qkv_bias is None:
        config["attention_bias"] = shape.qkv_bias
    if family.mlp_bias is None and shape.mlp_bias:
        config["mlp_bias"] = True
    if family.partly_rotated:
        config["partial_rotary_factor"] = shape.rotated
    if shape.rope_scaling is not None:
        config["rope_scaling"] = _scaling_config(shape.rope_scaling)
    return {family.config_keys.get(key, key): value for key, value in config.items()} | dict(family.write(shape))


def _family(model_type: object, where: str) -> Family:
    for family in trained_families():
        if family.model_type == model_type:
            return family
    known = [f.model_type for f in trained_families()]
    # no nearest one: a file's kind is no slip of the pen, and mixtral is no mistral
    raise ConfigError(f"{where}: model_type {model_type!r} is not supported", hint=f"known: {', '.join(known)}")


def _refuse_variants(config: Mapping[str, Any], get: ConfigReader, family: Family) -> None:
    """Keys that change what is computed in ways hetctl's model does not follow."""
    odd, key = None, family.config_keys.get("hidden_act", "hidden_act")
    if config.get(key, family.activations[0]) not in family.activations:
        odd = f"{key} '{config[key]}'"
    elif config.get("quantization_config"):
        odd = "quantised weights"
    elif (width := config.get("word_embed_proj_dim")) is not None and width != config.get("hidden_size"):
        odd = "word_embed_proj_dim unlike hidden_size"
    else:
        musts = family.config_musts.items()
        odd = next((f"{k}={config[k]}" for k, must in musts if config.get(k, must) not in (must, None)), None)
    if odd:
        plain = " and ".join(f.title for f in trained_families())
        raise ConfigError(f"{get.where}: {odd} is not supported", hint=f"hetctl trains plain {plain} models")


def _rope(config: Mapping[str, Any], where: str, get: ConfigReader, family: Family) -> dict[str, Any]:
    """What a shape has of rotary positions, from `rope_parameters` (transformers 5), there of each kind of layer where
    they differ, or from `rope_theta` and `rope_scaling` (before)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: the rotary parameters must be an object, found {given!r}")
    found: dict[str, Any] = {}
    if isinstance(given.get(FULL), Mapping):
        local = ConfigReader(given.get(SLIDING) or {}, where)
        if local.config.get("rope_type", "default") != "default":
            raise ConfigError(f"{where}: stretched rotary positions of layers with windows are not supported")
        found["local_rope_theta"] = local.positive("rope_theta", 10_000.0)
        given = given[FULL]
    beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    both = ConfigReader({**{k: config.get(k) for k in beside}, **given}, where)
    found["rope_theta"], found["rotated"] = (
        both.number("rope_theta", 10000.0),
        both.number("partial_rotary_factor", 1.0),
    )
    if found["rotated"] != 1.0 and not family.partly_rotated:
        raise ConfigError(f"{where}: a partial_rotary_factor is not supported in {family.model_type}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("su", "yarn") and family.partly_rotated:
        kind = "longrope"  # as Phi-3 first called it
    return found | {"rope_scaling": _scaling(kind, both, get.whole("max_position_embeddings", 2048))}


def _scaling(kind: object, both: ConfigReader, longest: int) -> RopeScaling | None:
    if kind in ("default", None):
        return None
    original = both.whole("original_max_position_embeddings", longest)
    if kind == "longrope":
        return _longrope(both, original, longest)
    factor = both.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "llama3":
        low, high = both.number("low_freq_factor"), both.number("high_freq_factor")
        return RopeScaling("llama3", factor, original, low, high)
    if kind == "yarn" and both.config.get("truncate", True) and not both.config.get("mscale"):
        attention = both.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        fast, slow = both.number("beta_fast", 32.0), both.number("beta_slow", 1.0)
        return RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention)
    raise ConfigError(
        f"{both.where}: rotary scaling '{kind}' is not supported", hint="known: linear, llama3, yarn, longrope"
    )


def _longrope(both: ConfigReader, original: int, longest: int) -> RopeScaling:
    """LongRoPE (arXiv 2402.13753), as Phi-3 and Phi-4-mini use it."""
    if original < 2:
        raise ConfigError(f"{both.where}: original_max_position_embeddings must be at least 2, found {original}")
    factor = both.number("factor", longest / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = both.number("attention_factor", usual)
    short, long = (both.listed(f"{which}_factor", float, 1) for which in ("short", "long"))
    return RopeScaling("longrope", factor, original, attention_factor=attention, short_factors=short, long_factors=long)


def _scaling_config(scaling: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.kind == "longrope":
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.kind in ("yarn", "longrope"):
        found["attention_factor"] = scaling.attention_factor
    return found


def model_folder(model: str) -> Path | None:
    """The folder that `model.name` names. None for a config.json and for a known name, whatever lies beside it."""
    folder = Path(model)
    return folder if model not in SHAPES and folder.is_dir() else None


def find_weights(model: str) -> Path | None:
    """The folder of weights that `model.name` names: a Hugging Face folder with safetensors in it, else None."""
    folder = model_folder(model)
    if folder is not None and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return folder.resolve()
    return None


def refuse_unread_weights(model: str) -> None:
    """Raise ConfigError where `model.name` is a folder of weights that would not be read: training would start anew."""
    folder = model_folder(model)
    if folder is None or find_weights(model):
        return
    files = sorted(f for f in folder.iterdir() if f.suffix in (SAFETENSORS, *OTHER_FORMATS) and f.is_file())
    if not files:
        return
    anew = f"for random weights name {folder / 'config.json'}"
    if files[0].suffix == SAFETENSORS:
        raise ConfigError(
            f"{folder} has {files[0].name}, but neither {SINGLE} nor {INDEX}", hint=f"fetch the folder anew; {anew}"
        )
    raise ConfigError(
        f"{folder} holds its weights as {files[0].name}, hetctl reads safetensors",
        hint=f"convert them: save_pretrained() of transformers writes safetensors; {anew}",
    )
