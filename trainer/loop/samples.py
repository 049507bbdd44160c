"""Texts that a model continues in the midst of its training, on the stages that train it: the first replica's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.events import Sampled
from hetctl.trainer.data.datasets import Dataset
from hetctl.trainer.data.end_tokens import end_tokens, holds_chats
from hetctl.trainer.data.tokenizer import Tokenizer, load_tokenizer
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.model.compute_precision import compute_in
from hetctl.trainer.model.generation import continuation
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.model.tensor_parallel import TensorShare
from hetctl.trainer.recipe import DataSection

LONGEST_PROMPT = 64  # tokens of a held-out text; of a conversation all that stands before the answer


def prompts(validation: Dataset, count: int) -> Iterator[list[int]]:
    """Of held-out samples what stands before the first token that bears loss; where all do, their first half."""
    inputs, targets = validation.batch(0, 0, count)[:2]
    for row, wanted in zip(inputs, targets, strict=True):
        answer, half = int(np.argmax(wanted != IGNORED)), len(row) // 2
        yield row[: answer + 1].tolist() if answer else row[max(half + 1 - LONGEST_PROMPT, 0) : half + 1].tolist()


@lru_cache(maxsize=1)
def _words(data: DataSection) -> tuple[Tokenizer, frozenset[int]]:
    """The tokenizer, and what ends a text: read once for all of a run's validations, some are of many megabytes."""
    tokenizer = load_tokenizer(data)
    return tokenizer, end_tokens(data, tokenizer, chat=holds_chats(data))


def sampled(trainer: Trainer, step: int) -> list[Sampled]:
    """What the recipe asks to be shown; every rank takes part, and all return the same."""
    wanted, data = trainer.job.recipe.train, trainer.job.recipe.data
    if not wanted.samples or trainer.batches.validation is None:
        return []
    tokenizer, ends = _words(data)
    told = [ends]
    dist.broadcast_object_list(told)  # other hosts may hold other settings beside the same tokenizer
    found = []
    for prompt in prompts(trainer.batches.validation, wanted.samples):
        text = continued(trainer, prompt, most=wanted.sample_tokens, ends=told[0])
        found.append(Sampled(step, tokenizer.decode(prompt), tokenizer.decode(text)))
    return found


def continued(trainer: Trainer, prompt: Sequence[int], *, most: int, ends: Collection[int] = ()) -> list[int]:
    """The likeliest tokens behind a prompt; every rank takes part, and all return the same."""
    following, longest = partial(_following, trainer), trainer.job.shape.max_seq_len
    with torch.compiler.set_stance("force_eager"):  # kernels for every length would be compiled
        return list(
            continuation(
                following, trainer.models, prompt, most=most, longest=longest, ends=ends, device=trainer.device
            )
        )


def _following(trainer: Trainer, further: Tensor) -> int:
    """The likeliest token behind further ones [1, tokens], which go through the stages one after the other.

    Whoever leads a stage tells all ranks what it put out: a rank holds several stages, one, or none.
    """
    place, shape = trainer.place, trainer.job.shape
    stages, value = trainer.job.plan.replicas[0].stages, further
    hidden = torch.empty(
        (1, further.shape[1], shape.hidden),
        dtype=compute_in(trainer.job.recipe.train.precision, trainer.device),
        device=trainer.device,
    )
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        told = further.new_empty(1) if last else torch.empty_like(hidden)
        if place.replica == 0 and number in place.stages:
            model = trainer.models[place.stages.index(number)]
            out = model(value)
            told = likeliest(out[0, -1], model.tensor, vocabulary=shape.vocab) if last else out
        dist.broadcast(told, src=stage.ranks[0])
        value = told
    return int(value)


def likeliest(logits: Tensor, tensor: TensorShare, *, vocabulary: int) -> Tensor:
    """The word [1] of the largest logit, of which a tensor group's ranks have their parts."""
    top, index = logits.max(0)
    if tensor.degree == 1:
        return index.view(1)
    mine = torch.stack((top.double(), index.double()))
    every = [torch.empty_like(mine) for _ in range(tensor.degree)]
    dist.all_gather(every, mine, group=tensor.group)
    best = max(range(tensor.degree), key=lambda rank: float(every[rank][0]))
    return (every[best][1].long() + share(vocabulary, tensor.degree, best)[0]).view(1)
