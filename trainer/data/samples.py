"""Samples: the global batch of any step, in an order that does not depend on the plan."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.tokens import TokenArray

Samples = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Where a step's samples come from."""

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        """Inputs and targets [past_last - first, seq_len] of those samples of a step's global batch."""
        ...


class PackedTokens:
    """Windows of a flat token array in an order shuffled once per epoch; targets are the next tokens."""

    def __init__(self, tokens: TokenArray, *, seq_len: int, global_batch: int, seed: int) -> None:
        self.tokens, self.seq_len, self.global_batch, self.seed = tokens, seq_len, global_batch, seed
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                f"the text is {len(tokens)} tokens, too short for one sample of {seq_len}",
                hint="use more text or a smaller model.seq_len",
            )
        self._epoch: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        numbers = [self._window(step * self.global_batch + i) for i in range(first, past_last)]
        starts = np.asarray(numbers, dtype=np.int64)[:, None] * self.seq_len
        rows = self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def _window(self, position: int) -> int:
        epoch, index = divmod(position, self.windows)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.windows))
        return int(self._epoch[1][index])
