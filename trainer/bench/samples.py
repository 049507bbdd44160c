"""What measuring programs share: random samples, this rank's device, and a moment when every device is done."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from hetctl.comm.operation.device import synchronize
from hetctl.trainer.data.datasets import Samples
from hetctl.trainer.model.head_loss import IGNORED


class RandomSamples:
    """Uniform random tokens: the arithmetic does not care what they say."""

    def __init__(self, vocab: int, seq_len: int, *, pairs: bool = False) -> None:
        """With `pairs` each sample is one of two documents of the same length."""
        self.vocab, self.seq_len, self.pairs = vocab, seq_len, pairs

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, ...]:
        random = np.random.default_rng((step, first))
        tokens = random.integers(0, self.vocab, (past_last - first, self.seq_len + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        halves = np.zeros_like(inputs) + 1 + (np.arange(self.seq_len) >= self.seq_len // 2)
        return (inputs, targets, halves) if self.pairs else (inputs, targets)


class UnevenSamples(RandomSamples):
    """Random tokens that depend on the sample's number alone; each sample has its own number of valid targets, some as
    few as one, so that a mean of means is no mean."""

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        inputs, targets = [], []
        for sample in range(first, past_last):
            random = np.random.default_rng((step, sample))
            tokens = random.integers(0, self.vocab, self.seq_len + 1)
            wanted = tokens[1:].copy()
            wanted[int(random.integers(1, self.seq_len + 1)) :] = IGNORED
            inputs.append(tokens[:-1])
            targets.append(wanted)
        return np.asarray(inputs), np.asarray(targets)


def settle(device: torch.device) -> None:
    """Wait for this device and for all ranks."""
    synchronize(device)
    dist.barrier()
