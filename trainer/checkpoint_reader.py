"""Reading a checkpoint: whole tensors from the parts that ranks wrote, each file checked against its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hetctl.comm.errors import ConfigError
from hetctl.trainer.checkpoints import MANIFEST, previous

FORMAT = 2


class Reader:
    """One whole checkpoint. Raises ConfigError when it is none, damaged, or of another model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = _manifest(path)
        self._opened: dict[str, Any] = {}
        self._parts: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
        for file, entry in self._manifest["files"].items():
            for key, (name, kind, first, past) in entry["tensors"].items():
                self._parts.setdefault((name, kind), []).append((first, past, file, key))

    @property
    def step(self) -> int:
        return int(self._manifest["step"])

    @property
    def updates(self) -> int:
        """Optimiser updates done: fewer than steps where some were skipped."""
        return int(self._manifest["updates"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape."""
        return {name: tuple(shape) for name, shape in self._manifest["shapes"].items()}

    def read(self, name: str, kind: str, *, shape: Sequence[int] | None = None) -> torch.Tensor:
        """One parameter's masters ('master') or optimiser state, whole, in the precision it was kept in."""
        wanted = tuple(shape) if shape is not None else self.shapes.get(name)
        parts = sorted(self._parts.get((name, kind), ()))
        if not parts or wanted is None:
            raise ConfigError(f"the checkpoint {self.path} has no {kind} of '{name}'", hint="it is of another training")
        if self.shapes[name] != wanted:
            raise ConfigError(
                f"'{name}' has shape {list(self.shapes[name])} in {self.path}, the model has {list(wanted)}"
            )
        values = [self._open(file).get_tensor(key) for _, _, file, key in parts]
        return torch.cat(values).view(wanted) if len(values) > 1 else values[0].view(wanted)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            path = self.path / name
            if not path.is_file() or _sha256(path) != self._manifest["files"][name]["sha256"]:
                older = previous(self.path)
                raise ConfigError(
                    f"{path} does not match its hash: it is damaged",
                    hint=f"the checkpoint before it: --resume {older}" if older else "there is no older checkpoint",
                )
            self._opened[name] = safe_open(str(path), framework="pt")
        return self._opened[name]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a checkpoint: {error}", hint="name a step-N folder of checkpoints/") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is a checkpoint of another format")
    for name in manifest["files"]:
        if Path(name).name != name:
            raise ConfigError(f"{path}: the manifest names a file outside its folder")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
