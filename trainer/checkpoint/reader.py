"""Reading a checkpoint: whole tensors from the parts that ranks wrote, each file checked against its hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hetctl.comm.contract.errors import ConfigError, reason_of
from hetctl.comm.contract.events import Remembered
from hetctl.comm.contract.files import read_json
from hetctl.comm.contract.values import decode
from hetctl.trainer.checkpoint.best import BestSoFar
from hetctl.trainer.checkpoint.listing import MANIFEST, previous
from hetctl.trainer.gradients.loss_scale import LossScale
from hetctl.trainer.model.model import shapes_of
from hetctl.trainer.model.shapes import ModelShape

FORMAT = 3  # 2 had no cuts: it is read as well
READABLE = (2, 3)
Cut = tuple[int, int, int]  # dimension, first and past-last index


class Reader:
    """One whole checkpoint. Raises ConfigError when it is none, damaged, or of another model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = _manifest(path)
        self._opened: dict[str, Any] = {}
        self._parts: dict[tuple[str, str], dict[Cut | None, list[tuple[int, int, str, str]]]] = {}
        for file, entry in self._manifest["files"].items():
            for key, (name, kind, first, past, *cut) in entry["tensors"].items():
                parts = self._parts.setdefault((name, kind), {})
                parts.setdefault((cut[0], cut[1], cut[2]) if cut else None, []).append((first, past, file, key))

    @property
    def step(self) -> int:
        return int(self._manifest["step"])

    @property
    def updates(self) -> int:
        """Optimiser updates done: fewer than steps where some were skipped."""
        return int(self._manifest["updates"])

    @property
    def loss_scale(self) -> LossScale | None:
        """fp16's, where that was trained in."""
        found = self._manifest.get("loss_scale")
        return found and decode(LossScale, found, where=f"{self.path.name}: loss_scale")

    @property
    def best(self) -> BestSoFar:
        """Of the validations before it; older checkpoints say nothing of them."""
        return decode(BestSoFar, self._manifest.get("best", {}), where=f"{self.path.name}: best")

    @property
    def lately(self) -> tuple[Remembered, ...]:
        """Its last steps' figures; older checkpoints have none."""
        said = self._manifest.get("lately", [])
        steps = said if isinstance(said, list) else [said]
        return tuple(decode(Remembered, step, where=f"{self.path.name}: lately") for step in steps)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape."""
        return {name: tuple(shape) for name, shape in self._manifest["shapes"].items()}

    def check_is_of(self, model: ModelShape, *, whole: bool, base: str | None) -> None:
        """Raise ConfigError for parameters that the model has not, or not so, and where `whole` for lacking ones; for
        adapters of anything but the `base` (see `base.py`; None: unknown) too."""
        wanted, held = shapes_of(model), self.shapes
        unlike = [name for name in held if wanted.get(name) != held[name]]
        if unlike:
            asks = wanted.get(unlike[0])
            raise ConfigError(
                f"{self.path} is of another model than {model.name}: '{unlike[0]}' has shape {list(held[unlike[0]])} "
                f"there, {list(asks) if asks else 'none'} here",
                hint="give each model a run folder of its own (--run-dir)",
            )
        if base != self._manifest.get("base", base) and base is not None:
            raise ConfigError(
                f"{self.path} has adapters of other weights than {model.name}'s, or with another lora.alpha or "
                "lora.dora",
                hint="adapters go on with what they were trained on: name that folder as the model",
            )
        lacking = sorted(wanted.keys() - held.keys())
        if whole and lacking:
            raise ConfigError(
                f"{self.path} lacks {len(lacking)} of {len(wanted)} parameters, '{lacking[0]}' first: other hosts keep "
                "their shards",
                hint="`hetctl export` fetches them where the run was started; or checkpoint.store=gather:HOST",
            )

    def read(self, name: str, kind: str, *, shape: Sequence[int] | None = None) -> torch.Tensor:
        """One parameter's masters ('master') or optimiser state, whole, in the precision it was kept in."""
        wanted = tuple(shape) if shape is not None else self.shapes.get(name)
        parts = self._parts.get((name, kind))
        if not parts or wanted is None:
            raise ConfigError(
                f"the checkpoint {self.path} has no {kind} of '{name}': a host that kept it is gone, or it is of "
                "another training",
                hint="bring that host back, or begin anew: --resume never",
            )
        if self.shapes[name] != wanted:
            raise ConfigError(
                f"'{name}' has shape {list(self.shapes[name])} in {self.path}, the model has {list(wanted)}"
            )
        if None in parts:
            return self._joined(parts[None], wanted, f"'{name}' ({kind})")
        whole: torch.Tensor | None = None
        past = 0
        for cut, entries in sorted(parts.items(), key=lambda item: item[0] or (0, 0, 0)):
            assert cut is not None
            dim, low, high = cut
            held = self._joined(entries, (*wanted[:dim], high - low, *wanted[dim + 1 :]), f"'{name}' ({kind})")
            whole = held.new_empty(wanted) if whole is None else whole
            whole.narrow(dim, low, high - low).copy_(held)
            past = high if low == past else past
        assert whole is not None
        if past != wanted[dim]:
            raise self._lacking(f"'{name}' ({kind})")
        return whole

    def _joined(self, entries: Iterable[tuple[int, int, str, str]], shape: tuple[int, ...], what: str) -> torch.Tensor:
        """One part of a parameter from all who kept some of its elements."""
        parts = sorted(entries)
        if _covered(parts) != math.prod(shape):
            raise self._lacking(what)
        values: list[torch.Tensor] = [self._open(file).get_tensor(key) for _, _, file, key in parts]
        return torch.cat(values).view(shape) if len(values) > 1 else values[0].view(shape)

    def _lacking(self, what: str) -> ConfigError:
        return ConfigError(f"the checkpoint {self.path} lacks a part of {what}: who kept it is gone")

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            path = self.path / name
            if not path.is_file() or sha256(path) != self._manifest["files"][name]["sha256"]:
                raise ConfigError(f"{path} does not match its hash: it is damaged", hint=_way_back(self.path))
            self._opened[name] = safe_open(str(path), framework="pt")
        return self._opened[name]


def _way_back(path: Path) -> str:
    """What to do without a checkpoint."""
    own = path.with_name(path.name.removeprefix("gathered-"))
    older = previous(own)
    if older is None:
        return "there is no older checkpoint"
    if own != path:  # from several hosts, each of which has its own part of the older one as well
        return f"without {own.name} on any host the run goes on from {older.name}"
    return f"the checkpoint before it: --resume {older}"


def _covered(parts: Sequence[tuple[int, int, str, str]]) -> int:
    """How many elements sorted parts hold without a gap, from the first on."""
    past = 0
    for first, end, _, _ in parts:
        if first != past:
            break
        past = end
    return past


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(path / MANIFEST)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a checkpoint: {error}", hint="name a step-N folder of checkpoints/") from None
    if not isinstance(manifest, dict) or manifest.get("format") not in READABLE:
        raise ConfigError(f"{path} is a checkpoint of another format")
    try:
        _check_entries(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else reason_of(error)
        raise ConfigError(f"{path / MANIFEST} is damaged: {why}", hint=_way_back(path)) from None
    for name in manifest["files"]:
        if Path(name).name != name:
            raise ConfigError(f"{path}: the manifest names a file outside its folder")
    return manifest


def _check_entries(manifest: dict[str, Any]) -> None:
    """Raise one of Python's own errors unless all that a reader takes from it is there."""
    int(manifest["step"] + manifest["updates"])
    for shape in manifest["shapes"].values():
        math.prod(map(int, shape))
    for entry in manifest["files"].values():
        entry["sha256"].lower()
        for name, kind, first, past, *cut in entry["tensors"].values():
            if (
                not (isinstance(name, str) and isinstance(kind, str))
                or not all(isinstance(n, int) for n in (first, past, *cut))
                or len(cut) not in (0, 3)
            ):
                raise ValueError(f"no part of a tensor: {[first, past, *cut]}")


def sha256(path: Path) -> str:
    """The hash of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
