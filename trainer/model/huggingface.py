"""Hugging Face folders: which file holds which tensor, reading them into a stage, writing a whole model back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.files import read_json, write_json
from hetctl.comm.contract.units import MiB
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.llama import LLAMA
from hetctl.trainer.families.registry import FAMILIES, family_of
from hetctl.trainer.model.config import INDEX, SINGLE, read_config
from hetctl.trainer.model.model import shapes_of
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import whole_shape

MAX_FILE_BYTES = 4096 * MiB
OTHER_MODEL = "the weights belong to another model than config.json: fetch the folder anew"
OTHER_TYPE = "fetch the model in one of these: hetctl reads no quantised weights"
FLOATS = ("BF16", "F16", "F32", "F64")  # as safetensors names them
SETTINGS = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class WeightFiles:
    """The tensors of a folder by the model's names for them, each read on demand."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder, self.shape = folder, shape
        self._opened: dict[str, Any] = {}
        indexed = (folder / INDEX).is_file()
        self._list = folder / (INDEX if indexed else SINGLE)  # where a tensor that is missing should have been named
        self._where = _index(folder) if indexed else dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError unless every file is whole and these tensors are floats in these shapes (headers only).

        What else the files hold is not read: a copy of a tied head, rotary tables.
        """
        for name in sorted(set(self._where.values())):
            self._open(name)
        wrong = [error for name, shape in shapes.items() if (error := self._wrong(name, shape))]
        if wrong:
            more = f" ({len(wrong) - 1} more are missing or of another shape or type)" if len(wrong) > 1 else ""
            raise ConfigError(wrong[0].message + more, hint=wrong[0].hint)

    def read(self, name: str, shape: Iterable[int]) -> torch.Tensor:
        """One tensor. Raises ConfigError when it is missing, damaged or of another shape or type."""
        wanted = list(shape)
        if wrong := self._wrong(name, wanted):
            raise wrong
        name, first, _ = self._stored(name, wanted)
        try:
            tensor: torch.Tensor = self._open(self._where[name]).get_slice(name)[first : first + wanted[0]]
        except SafetensorError as error:
            raise _damaged(self.folder / self._where[name], error) from None
        return tensor

    def _stored(self, name: str, shape: Sequence[int]) -> tuple[str, int, list[int]]:
        """The tensor that holds a parameter, the parameter's first row there, and that tensor's whole shape."""
        tensor, parts = family_of(self.shape.family).parts(name)
        if len(parts) == 1:
            return tensor, 0, list(shape)
        rows = [whole_shape(part, self.shape)[0] for part in parts]
        return tensor, sum(rows[: parts.index(name)]), [sum(rows), *shape[1:]]

    def _wrong(self, name: str, shape: Iterable[int]) -> ConfigError | None:
        """Why a tensor cannot be read; None when it can."""
        name, _, wanted = self._stored(name, list(shape))
        if name not in self._where:
            return ConfigError(f"{self._list} has no '{name}'", hint=OTHER_MODEL)
        path, file = self.folder / self._where[name], self._open(self._where[name])
        try:
            part = file.get_slice(name)
            found, kind = part.get_shape(), part.get_dtype()
        except SafetensorError:
            return ConfigError(f"{path} has no '{name}', which {INDEX} says it holds", hint=OTHER_MODEL)
        if found != wanted:
            message = f"'{name}' has shape {found} in {path}, config.json says {wanted}"
            return ConfigError(message, hint=OTHER_MODEL)
        if kind not in FLOATS:
            return ConfigError(f"'{name}' is stored as {kind} in {path}, not as {', '.join(FLOATS)}", hint=OTHER_TYPE)
        return None

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            path = self.folder / name
            if not os.path.isfile(path):  # unlike Path's it answers for names that no file can have
                raise ConfigError(f"{path} is missing", hint="the index names it: fetch the folder anew")
            try:
                self._opened[name] = safe_open(str(path), framework="pt")
            except SafetensorError as error:
                raise _damaged(path, error) from None
        return self._opened[name]


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raise ConfigError unless the files are whole and hold all the model needs (headers only: quick for any size)."""
    WeightFiles(folder, shape).check(shapes_of(replace(shape, adapters=None)))


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    names: Iterable[str],
    tensor_of: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write config.json and safetensors (with an index where there are several); the index comes last.

    Raises WorkFailed where the disk takes no more, and then leaves no part there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _stored(names, tensor_of, FAMILIES.get(config["model_type"], LLAMA), dtype)
    parts: list[Path] = []
    where: dict[str, int] = {}
    total = 0
    try:
        for group in _by_size(tensors, max_file_bytes):
            where |= dict.fromkeys(group, len(parts))
            total += sum(t.nbytes for t in group.values())
            parts.append(folder / f".part-{len(parts):05d}.safetensors")
            save_tensors(group, parts[-1])
            group.clear()  # its memory is for the next one
    except BaseException:  # a full disk, a shard that is damaged, Ctrl-C
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    files = _named(parts, folder)
    if len(files) > 1:
        weight_map = {name: files[number].name for name, number in where.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", dict(config))
    return files


def _stored(
    names: Iterable[str], tensor_of: Callable[[str], torch.Tensor], family: Family, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters as the family's files hold them: some joined into one tensor, which stands where its first part is."""
    for name in names:
        tensor, parts = family.parts(name)
        if name == parts[0]:
            rows = [tensor_of(part).to(dtype) for part in parts]
            yield tensor, (torch.cat(rows) if len(rows) > 1 else rows[0]).contiguous()


def _by_size(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in their order, in groups of at most so many bytes; one that is larger is alone."""
    group: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if group and sum(t.nbytes for t in group.values()) + tensor.nbytes > max_bytes:
            yield group
            group = {}
        group[name] = tensor
    yield group


def save_tensors(group: dict[str, torch.Tensor], file: Path) -> None:
    """Write them as safetensors. Raises WorkFailed, and then leaves no part of the file."""
    try:
        file.touch()
        mode = file.stat().st_mode  # as the umask has it: safetensors makes files for their owner alone
        save_file(group, str(file), metadata={"format": "pt"})
        file.chmod(mode)
    except (SafetensorError, OSError) as error:
        file.unlink(missing_ok=True)
        raise WorkFailed(f"the model cannot be written to {file.parent}: {error}", hint="is its disk full?") from None


def copy_beside(source: Path, folder: Path, names: Iterable[str]) -> list[str]:
    """Copy those files that are there (`SETTINGS`, `TOKENIZER_FILES`); returns their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


def exported_config(source: Path, *, dtype: str) -> dict[str, Any]:
    """The config of the folder a run was fine-tuned from, in the precision that is exported."""
    config: dict[str, Any] = dict(read_config(source / "config.json"))
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = dtype
    return config


def _named(parts: list[Path], folder: Path) -> list[Path]:
    """Give the parts their final names, which say how many there are."""
    if len(parts) == 1:
        return [parts[0].replace(folder / SINGLE)]
    names = [folder / f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors" for k in range(len(parts))]
    return [part.replace(name) for part, name in zip(parts, names, strict=True)]


def _index(folder: Path) -> dict[str, str]:
    try:
        found = read_json(folder / INDEX)["weight_map"]
        where = {str(k): str(v) for k, v in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder / INDEX} is no index of weights: {error}") from None
    for name in where.values():
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names a file outside its folder: '{name}'")
    return where


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged or cut short: {error}", hint="fetch the file anew")
