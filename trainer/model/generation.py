"""Continuing a text with a model's likeliest tokens, one by one; layers keep the keys and values that they saw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hetctl.trainer.model.model import StageModel

Next = Callable[[Tensor], int]  # the likeliest token behind further ones [1, tokens]


@torch.no_grad()
def continuation(
    following: Next,
    models: Sequence[StageModel],
    prompt: Sequence[int],
    *,
    most: int,
    longest: int,
    ends: Collection[int],
    device: torch.device,
) -> Iterator[int]:
    """Up to `most` tokens, ended by any of `ends`, which is not among them, and by the `longest` text that the model
    knows.

    `models` are those that `following` calls, with what is new of the text alone: they keep what they have seen.
    """
    further = prompt
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.continuing(min(len(prompt) + most, longest)))
        for _ in range(min(most, longest - len(prompt))):
            token = following(torch.tensor([further], device=device))
            if token in ends:
                return
            yield token
            further = [token]


def generate(model: StageModel, prompt: Sequence[int], *, most: int, ends: Collection[int] = ()) -> Iterator[int]:
    """The tokens with which a whole model continues a prompt of at least one. Never beyond the model's positions."""
    device, longest = next(model.parameters()).device, model.shape.max_seq_len
    following = lambda further: int(model(further)[0, -1].argmax())  # noqa: E731
    return continuation(following, [model], prompt, most=most, longest=longest, ends=ends, device=device)
