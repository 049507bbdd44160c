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

    def __init__(self, vocab: int, seq_len: int) -> None:
        self.vocab, self.seq_len = vocab, seq_len

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        random = np.random.default_rng((step, first))
        tokens = random.integers(0, self.vocab, (past_last - first, self.seq_len + 1))
        return tokens[:, :-1], tokens[:, 1:]


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
