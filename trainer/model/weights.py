"""Whether a model's name means weights to start from. No torch: the launcher's side asks before it starts."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.model.shapes import SHAPES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAFETENSORS = ".safetensors"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


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
