"""A trained model, or a Hugging Face folder, asked to go on from a text, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.operation.device import accelerator
from hetctl.console import Sink
from hetctl.runs.export import checked, saved_model, whole_weights
from hetctl.trainer.data.chat_template import find_template
from hetctl.trainer.data.end_tokens import end_tokens, holds_chats
from hetctl.trainer.data.tokenizer import Tokenizer, load_tokenizer
from hetctl.trainer.model.config import find_shape, find_weights
from hetctl.trainer.model.generation import generate
from hetctl.trainer.model.huggingface import WeightFiles, check_weights
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import TOKENIZER, DataSection

Read = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """A whole model on this machine's first device, its tokenizer, and whether it is asked by its chat template."""

    model: StageModel
    tokenizer: Tokenizer
    data: DataSection
    source: str
    chat: bool

    def continued(self, text: str, *, most: int) -> Iterator[str]:
        """What the model goes on with, piece by piece. Raises ConfigError for a text of no or too many tokens."""
        text = find_template(self.data).asked(text) if self.chat else text
        ends = end_tokens(self.data, self.tokenizer, chat=self.chat)
        prompt, longest = self.tokenizer.encode(text).tolist(), self.model.shape.max_seq_len
        if not 0 < len(prompt) < longest:
            raise ConfigError(f"the text is {len(prompt)} tokens, it must be 1 to {longest - 1} for this model")
        tokens: list[int] = []
        said = ""
        for token in generate(self.model, prompt, most=most, ends=ends):
            tokens.append(token)
            whole = self.tokenizer.decode(tokens)
            if not whole.endswith("\ufffd"):  # of a character only the first bytes
                yield whole[len(said) :]
                said = whole


def load(word: str | None, sink: Sink, *, chat: bool | None, step: str | None = None) -> Loaded:
    """A run's newest checkpoint (or a named one), or a Hugging Face folder with weights. Raises HetctlError.

    `chat` None: a run is asked as it was trained, a folder goes on from the text.
    """
    if word is not None and (folder := find_weights(word)):
        if step is not None:
            raise ConfigError(f"'{word}' is a model, and has no steps", hint="--step is of a run")
        shape, file = find_shape(word), folder / TOKENIZER
        if not file.is_file():
            raise ConfigError(f"{folder} has no {TOKENIZER}", hint="a model without its tokenizer cannot read a text")
        check_weights(folder, shape)
        data = DataSection(tokenizer=str(file))
        return _loaded(shape, WeightFiles(folder, shape).read, data, str(folder), chat=bool(chat))
    with saved_model(word, sink, step=step) as (path, job):
        _, read = whole_weights(job, checked(path, job, merges=True))
        shape, data = replace(job.shape, adapters=None), job.recipe.data
        chat = _learnt_chats(data, sink) if chat is None else chat
        return _loaded(shape, lambda name, _: read(name), data, str(path), chat=chat)


def _learnt_chats(data: DataSection, sink: Sink) -> bool:
    try:
        return holds_chats(data)
    except ConfigError as error:
        sink.warn(f"taken as a text to go on from (--chat asks instead): what it was trained on is gone: {error}")
        return False


def _loaded(shape: ModelShape, read: Read, data: DataSection, source: str, *, chat: bool) -> Loaded:
    kind = accelerator()
    device, dtype = (torch.device("cpu"), torch.float32) if kind is None else (torch.device(kind, 0), torch.bfloat16)
    tokenizer = load_tokenizer(data)
    with device:
        model = StageModel(shape, (0, shape.layers)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named().items():
            parameter.copy_(read(name, tuple(parameter.shape)))
    return Loaded(model, tokenizer, data, source, chat)
