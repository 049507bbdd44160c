"""SmolLM3: every fourth layer knows no positions. (SmolLM and SmolLM2 are Llamas.)"""

from __future__ import annotations

from typing import Any

from hetctl.trainer.families.config_reader import ConfigReader
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.windows import read_windows, write_windows


def _read(get: ConfigReader) -> dict[str, Any]:
    layers, every = get.whole("num_hidden_layers"), get.whole("no_rope_layer_interval", 4)
    turned = get.listed("no_rope_layers", int, layers)[:layers] or [(layer + 1) % every != 0 for layer in range(layers)]
    unrotated = tuple(layer for layer, turns in enumerate(turned) if not turns)
    windows = read_windows(get, lambda layer: layer in unrotated) if get.flag("use_sliding_window") else {}
    return {"unrotated": unrotated, **windows}


def _write(shape: Any) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(layer not in shape.unrotated) for layer in range(shape.layers)],
        "use_sliding_window": bool(shape.windows),
        **write_windows(shape.windows, shape.layers),
        "pad_token_id": None,  # its usual one needs a large vocabulary
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    config_defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4},
    read=_read,
    write=_write,
)
