"""Dropout that is the same in any layout: of the sample, its step, the layer and the projection alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hetctl.trainer.model.splitmix import mixed

_LEVELS = 1 << 16  # of a 16-bit uniform; four of them are made at a time


def draws_of(numbers: Tensor, seed: int) -> Tensor:
    """What the dropout of samples follows from, [samples]: of each one's number in the whole run, and the seed."""
    return mixed(numbers.clone(), _key(f"dropout/{seed}"))


def of_layer(draws: Tensor, layer: int) -> Tensor:
    """The same for one layer."""
    return mixed(draws.clone(), _key(f"layer/{layer}"))


class InputDropout:
    """Of the values that one projection's adapter reads, of which this rank has [low, low + count) of each token."""

    def __init__(self, share: float, name: str, *, low: int) -> None:
        self.level = min(_LEVELS - 1, round(share * _LEVELS))
        self.key, self.low = _key(name), low

    def mask(self, draws: Tensor, like: Tensor) -> Tensor:
        """0 or 1 / (1 - share) for each of [samples, tokens, count] values; `draws` [samples] are of this layer."""
        samples, tokens, count = like.shape
        first, past = self.low // 4, -(-(self.low + count) // 4)
        token, word = (torch.arange(n, m, device=like.device) for n, m in ((0, tokens), (first, past)))
        counter = ((token << 32)[:, None] + word).expand(samples, -1, -1).clone()
        uniform = mixed(counter, mixed(draws.clone(), self.key)[:, None, None]).view(torch.int16)
        kept = uniform[..., self.low - 4 * first :][..., :count] >= self.level - _LEVELS // 2
        return kept.to(like.dtype) * (_LEVELS / (_LEVELS - self.level))


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
