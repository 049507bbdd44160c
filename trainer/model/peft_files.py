"""Adapters as PEFT's files, and merged into the weights that they are adapters of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetctl.comm.contract.files import write_json
from hetctl.trainer.families.registry import family_of
from hetctl.trainer.model.adapters import DOWN, MAGNITUDE, UP
from hetctl.trainer.model.huggingface import save_tensors
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.split_backward import norms_of_rows
from hetctl.trainer.model.tensor_cuts import whole_shape

Read = Callable[[str], Tensor]  # a parameter, whole, by its name
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def write_adapters(
    folder: Path, shape: ModelShape, names: Iterable[str], read: Read, *, weight: Read, base: str, dtype: torch.dtype
) -> None:
    """Write the two files that PEFT loads onto the model at `base`, from the adapters' parameters of these names.

    A frozen `weight` is asked for where only a part of a joined matrix is adapted, and its magnitudes are not.

    Raises WorkFailed where the disk takes no more.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    weights = (name.replace(f".{DOWN}.", ".") for name in names if f".{DOWN}." in name)
    for tensor, parts in dict(map(family_of(shape.family).parts, weights)).items():
        module, name = tensor.removesuffix(".weight"), tensor.split(".")[-2]
        down, up = _joined(shape, parts, read)
        ranks[name] = len(down)
        tensors |= {f"base_model.model.{module}.{k}.weight": v.to(dtype) for k, v in ((DOWN, down), (UP, up))}
        if shape.adapters and shape.adapters.dora:
            rows = torch.cat([_magnitudes(shape, part, read, weight) for part in parts])
            tensors[f"base_model.model.{module}.{MAGNITUDE}"] = rows.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / ADAPTER_FILES[1])
    write_json(folder / ADAPTER_FILES[0], _config(shape, ranks, base))


def merged(name: str, shape: ModelShape, base: Read, read: Read) -> Tensor:
    """A parameter of the model that computes without adapters what the base computes with them, in fp32 or better."""
    weight, (module, what) = base(name), (name.removesuffix(".weight"), name.split(".")[-2])
    if what not in shape.adapted or not name.endswith(".weight"):
        return weight
    assert shape.adapters is not None
    down, up = (read(f"{module}.{factor}.weight") for factor in (DOWN, UP))
    both = weight.to(up.dtype) + shape.adapters.scale * (up @ down)
    return both * (read(f"{module}.{MAGNITUDE}") / norms_of_rows(both))[:, None] if shape.adapters.dora else both


def _magnitudes(shape: ModelShape, part: str, read: Read, weight: Read) -> Tensor:
    """Of the rows of one part of a joined matrix; those that no adapter changes keep theirs."""
    module = part.removesuffix(".weight")
    adapted = module.split(".")[-1] in shape.adapted
    return read(f"{module}.{MAGNITUDE}") if adapted else norms_of_rows(weight(part))


def _joined(shape: ModelShape, parts: tuple[str, ...], read: Read) -> tuple[Tensor, Tensor]:
    """The factors of one matrix's adapter. Where a family's files join matrices (Phi's queries, keys and values), the
    factors of each stand in rows and columns of their own, and the rank is the sum of theirs."""
    downs, ups = [], []
    for part in parts:
        module = part.removesuffix(".weight")
        if module.split(".")[-1] in shape.adapted:
            downs.append(read(f"{module}.{DOWN}.weight"))
            ups.append(read(f"{module}.{UP}.weight"))
        else:
            ups.append(torch.zeros(whole_shape(part, shape)[0], 0))
    return torch.cat(downs).contiguous(), torch.block_diag(*ups).contiguous()


def _config(shape: ModelShape, ranks: dict[str, int], base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json; alpha grows with a joined matrix's rank, so that their ratio is the same."""
    assert shape.adapters is not None
    rank, alpha = shape.adapters.rank, shape.adapters.alpha
    joined = {name: count for name, count in ranks.items() if count != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_dora": shape.adapters.dora,
        "lora_dropout": shape.adapters.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": joined,
        "alpha_pattern": {name: alpha * count / rank for name, count in joined.items()},
        "bias": "none",
        "fan_in_fan_out": False,
    }
