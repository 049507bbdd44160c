"""Continuing a text with a model's likeliest tokens, one by one; layers keep the keys and values that they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hetctl.trainer.model.model import StageModel

Next = Callable[[Tensor], int]  # the likeliest token behind further ones [1, tokens]


def continuation(
    following: Next, prompt: Sequence[int], *, most: int, end: int | None, device: torch.device
) -> Iterator[int]:
    """Up to `most` tokens, ended by `end`, which is not among them."""
    further: Sequence[int] = prompt
    for _ in range(most):
        token = following(torch.tensor([further], device=device))
        if token == end:
            return
        yield token
        further = [token]


@torch.no_grad()
def generate(model: StageModel, prompt: Sequence[int], *, most: int, end: int | None) -> Iterator[int]:
    """The tokens with which a whole model continues a prompt of at least one. Never beyond the model's positions."""
    room = model.shape.max_seq_len - len(prompt)
    device = next(model.parameters()).device
    with model.continuing(min(len(prompt) + most, model.shape.max_seq_len)):
        yield from continuation(
            lambda further: int(model(further)[0, -1].argmax()), prompt, most=min(most, room), end=end, device=device
        )
