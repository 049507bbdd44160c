"""Checkpoints: safetensors shards and a JSON manifest with hashes, committed by one rename.

Tensors carry their Hugging Face names, so that a checkpoint loads under any other plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from hetctl.comm.errors import ConfigError
from hetctl.comm.files import write_json
from hetctl.trainer.checkpoints import MANIFEST
from hetctl.trainer.gradients import Gradients
from hetctl.trainer.spread import leads

FORMAT = 1


def save(folder: Path, step: int, gradients: Gradients, optimizer: torch.optim.Optimizer, *, keep: int) -> Path:
    """Save masters and optimiser state after `step` steps; every rank calls it. Returns the checkpoint's path.

    Each bucket is written by its owner. The folder gets its name only when every file is whole.
    """
    final, partial = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    mine = _owned_tensors(gradients, optimizer)
    files = {}
    if mine:
        name = f"shard-{dist.get_rank():05d}.safetensors"
        save_file(mine, str(partial / name))
        _sync(partial / name)
        files[name] = {"sha256": _sha256(partial / name), "tensors": sorted(mine)}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, files)
    if leads():
        merged = {name: entry for part in everybody for name, entry in part.items()}
        write_json(partial / MANIFEST, {"format": FORMAT, "step": step, "files": merged})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _sync(folder)
        _retain(folder, keep)
    dist.barrier()
    return final


def load(path: Path, gradients: Gradients, optimizer: torch.optim.Optimizer) -> int:
    """Restore masters and optimiser state; returns the number of steps done. Raises ConfigError.

    Every file that is read is checked against its hash first.
    """
    manifest = _manifest(path)
    where = {t: name for name, entry in manifest["files"].items() for t in entry["tensors"]}
    opened: dict[str, Any] = {}
    with torch.no_grad():
        for name, master in gradients.masters():
            state = optimizer.state[master]
            for key, tensor in _stored(name, master, where, path, opened, manifest):
                if key is None:
                    master.copy_(tensor)
                elif key == "step":
                    state[key] = tensor.to(torch.float32)
                else:
                    state[key] = tensor.to(master)
    gradients.publish()
    return int(manifest["step"])


def _owned_tensors(gradients: Gradients, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for bucket in gradients.buckets:
        if bucket.owner:
            for name, master in zip(bucket.names, bucket.masters, strict=True):
                tensors[name] = master.detach().cpu().contiguous()
                for key, value in optimizer.state.get(master, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{name}:{key}"] = value.detach().cpu().contiguous()
    return tensors


def _stored(
    name: str,
    master: torch.Tensor,
    where: dict[str, str],
    path: Path,
    opened: dict[str, Any],
    manifest: dict[str, Any],
) -> list[tuple[str | None, torch.Tensor]]:
    if name not in where:
        raise ConfigError(f"the checkpoint {path} has no '{name}'", hint="it belongs to another model")
    found: list[tuple[str | None, torch.Tensor]] = []
    for stored in [name, *(t for t in where if t.startswith(name + ":"))]:
        file = where[stored]
        if file not in opened:
            if _sha256(path / file) != manifest["files"][file]["sha256"]:
                raise ConfigError(
                    f"{path / file} does not match its hash: it is damaged", hint="use an older checkpoint"
                )
            opened[file] = safe_open(str(path / file), framework="pt")
        tensor = opened[file].get_tensor(stored)
        if stored == name and tensor.shape != master.shape:
            raise ConfigError(f"'{name}' has shape {list(tensor.shape)} in {path}, the model has {list(master.shape)}")
        found.append((stored.partition(":")[2] or None, tensor))
    return found


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


def _retain(folder: Path, keep: int) -> None:
    whole = sorted(p for p in folder.glob("step-*") if p.suffix != ".partial")
    for old in whole[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
