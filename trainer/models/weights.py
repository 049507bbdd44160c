"""Whether a model's name means weights to start from. No torch: the launcher's side asks before it starts."""

from __future__ import annotations

from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def find_weights(model: str) -> Path | None:
    """The folder of weights that `model.name` names: a Hugging Face folder with safetensors in it, else None."""
    folder = Path(model)
    if folder.is_dir() and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return folder.resolve()
    return None
