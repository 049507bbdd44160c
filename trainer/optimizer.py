"""The update of a step: AdamW or SGD on the masters, learning rate with linear warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hetctl.trainer.recipe import OptimizerSection


def build_optimizer(masters: Iterable[nn.Parameter], section: OptimizerSection) -> torch.optim.Optimizer:
    """The recipe's optimiser; matrices decay, vectors (norms, biases) do not."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for master in masters:
        (matrices if master.dim() >= 2 else vectors).append(master)
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr)
    return torch.optim.AdamW(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)


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
