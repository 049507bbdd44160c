"""What measuring programs share: random tokens, this rank's device, and a moment when every device is done."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

from hetctl.trainer.data.samples import Samples


class RandomSamples:
    """Uniform random tokens: the arithmetic does not care what they say."""

    def __init__(self, vocab: int, seq_len: int) -> None:
        self.vocab, self.seq_len = vocab, seq_len

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        random = np.random.default_rng((step, first))
        tokens = random.integers(0, self.vocab, (past_last - first, self.seq_len + 1))
        return tokens[:, :-1], tokens[:, 1:]


def settle(device: torch.device) -> None:
    """Wait for this device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def rank_device() -> torch.device:
    """The device that this rank was given, chosen."""
    if os.environ["HETCTL_DEVICE_TYPE"] != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["HETCTL_DEVICE_INDEX"]))
    torch.cuda.set_device(device)
    return device
