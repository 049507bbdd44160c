"""Which layers attend to a window of the last tokens, not to all that went before: how config.json says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.families.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(get: ConfigReader, is_local: Callable[[int], bool]) -> dict[str, Any]:
    """`windows` of a shape: as `layer_types` says, otherwise for the layers that the family's rule names."""
    layers, size = get.whole("num_hidden_layers"), get.whole("sliding_window", 0)
    kinds = get.listed("layer_types", str, layers)[:layers]
    if odd := next((kind for kind in kinds if kind not in (FULL, SLIDING)), None):
        raise ConfigError(f"{get.where}: '{odd}' in layer_types is not supported", hint=f"known: {FULL}, {SLIDING}")
    local = [kind == SLIDING for kind in kinds] if kinds else [is_local(layer) for layer in range(layers)]
    windows = tuple(size if here else 0 for here in local)
    return {"windows": windows if any(windows) else ()}


def write_windows(windows: Sequence[int], layers: int) -> dict[str, Any]:
    """The same as keys of config.json."""
    kinds = [SLIDING if window else FULL for window in windows or [0] * layers]
    return {"sliding_window": max(windows, default=0) or None, "layer_types": kinds}


def one_window(get: ConfigReader) -> dict[str, Any]:
    """`windows` of families in which all layers are alike."""
    size = get.whole("sliding_window", 0)
    return {"windows": (size,) * get.whole("num_hidden_layers") if size else ()}


def write_one_window(shape: Any) -> dict[str, Any]:
    """The same as a key of config.json."""
    return {"sliding_window": max(shape.windows, default=None)}
