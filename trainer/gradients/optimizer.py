"""The update of a step: AdamW or SGD on the master shards, learning rate with linear warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hetctl.trainer.gradients.buckets import ShardPiece
from hetctl.trainer.gradients.eight_bit import AdamW8bit
from hetctl.trainer.recipe import OptimizerSection


def build_optimizer(pieces: Iterable[ShardPiece], section: OptimizerSection) -> torch.optim.Optimizer:
    """The recipe's optimiser; matrices decay, vectors (norms, biases) do not. On devices one fused kernel,
    also where their state is on the host."""
    held = list(pieces)
    groups = [
        {
            "params": [p.master for p in held if p.decays == decays],
            "weight_decay": section.weight_decay * decays,
            "is_small": not decays,
        }
        for decays in (True, False)
    ]
    groups = [g for g in groups if g["params"]]
    like = held[0].master
    fused = like.dtype == torch.float32 and (not like.is_cpu or like.is_pinned())
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, fused=fused)
    kind = AdamW8bit if section.name == "adamw_8bit" else torch.optim.AdamW
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def scale_within(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Let the next update multiply gradients by `factor` itself, where it can (fused kernels): a pass less."""
    if not optimizer.defaults.get("fused"):
        return False
    like: torch.Tensor = optimizer.param_groups[0]["params"][0]
    optimizer.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=like.device)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=like.device)  # type: ignore[attr-defined]
    return True


def learning_rate(step: int, steps: int, section: OptimizerSection) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up, then cosine to min_lr_share of the peak."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    progress = (step - section.warmup_steps) / max(1, steps - section.warmup_steps)
    low = section.lr * section.min_lr_share
    return low + 0.5 * (section.lr - low) * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply gradients of global norm `norm` with so that it is at most `clip_norm` (0: never clip)."""
    return min(1.0, clip_norm / norm) if clip_norm > 0 and norm > 0 else 1.0
