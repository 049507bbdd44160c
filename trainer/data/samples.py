"""Conversations and texts as tokens, and which of the tokens bear loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.chat_template import Rendered, find_template
from hetctl.trainer.data.conversations import conversations
from hetctl.trainer.data.megatron import is_megatron
from hetctl.trainer.data.sources import documents, is_chat
from hetctl.trainer.data.tokenizer import Tokenizer, load_tokenizer
from hetctl.trainer.recipe import DataSection

SHOWN = 500  # characters of a text


@dataclass(frozen=True)
class Sample:
    """One conversation, rendered by the model's template: its text, its tokens, which characters each is ([tokens, 2]),
    and whether it bears loss."""

    name: str  # it decides whether it is held out
    text: str
    tokens: npt.NDArray[np.uint32]
    places: npt.NDArray[np.int64]
    bears_loss: npt.NDArray[np.bool_]
    side: str = ""  # of a preference pair: which of its answers this is


def samples(section: DataSection, tokenizer: Tokenizer) -> Iterator[Sample]:
    """All conversations of a source. Raises ConfigError, naming the row, where the assistant says nothing in one."""
    template = find_template(section)
    for talk in conversations(section):
        rendered = template.rendered(talk)
        tokens, places = tokenizer.encode_placed(rendered.text)
        bears_loss = _within(rendered, places)
        if not bears_loss[1:].any():  # the first token follows none that could foretell it
            raise ConfigError(f"{talk.place}: the chat template renders nothing that the assistant says")
        yield Sample(talk.name, rendered.text, tokens, places, bears_loss, talk.side)


def first_samples(section: DataSection) -> Iterator[Sample]:
    """The samples of a source, to look at; of a text, all of which bears loss, the beginning. Raises ConfigError."""
    if is_megatron(section.source):
        raise ConfigError(f"'{section.source}' is tokens already: there is no text to show")
    tokenizer = load_tokenizer(section)
    if is_chat(section):
        yield from samples(section, tokenizer)
        return
    for document in documents(section):
        text = document.text[:SHOWN]
        tokens, places = tokenizer.encode_placed(text)
        yield Sample(document.name, text, tokens, places, np.ones(len(tokens), dtype=np.bool_))


def _within(rendered: Rendered, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which tokens have characters that the assistant says, as transformers' assistant masks have them."""
    found = np.zeros(len(places), dtype=np.bool_)
    for first, past_last in rendered.spans:
        found |= (places[:, 0] < past_last) & (places[:, 1] > first)
    return found
