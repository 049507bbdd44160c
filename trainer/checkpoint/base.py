"""What adapters are adapters of: a digest that tells one base from another. No torch: the launcher's side asks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from hetctl.trainer.model.shapes import ModelShape

ENDS_BYTES = 1 << 16  # of each file that are looked at, first and last: its header, and weights that tuning changes


def base_digest(shape: ModelShape, weights: Path | None, *, seed: int) -> str | None:
    """Of the frozen weights (a folder's, or the random ones of a seed), how they are kept, and how adapters count.

    None where there are no adapters.
    """
    if shape.adapters is None:
        return None
    ways = (" dora" if shape.adapters.dora else "") + (f" {shape.quantised}" if shape.quantised else "")
    digest = hashlib.sha256(f"{shape.adapters.scale}{ways}".encode())
    if weights is None:
        digest.update(f"{replace(shape, adapters=None)} {seed}".encode())
        return digest.hexdigest()
    for file in (weights / "config.json", *sorted(weights.glob("model*.safetensors"))):
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(f"{file.name} {size}".encode() + stream.read(ENDS_BYTES))
            stream.seek(max(0, size - ENDS_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()
