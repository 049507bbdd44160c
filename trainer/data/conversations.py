"""Conversations: rows of a source as the messages that chat templates take, whatever shape they are written in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import parse_json
from hetctl.trainer.data.sources import SIDES, is_pairs, named_files
from hetctl.trainer.data.tables import ROW_SUFFIXES, Row, rows_of
from hetctl.trainer.recipe import DataSection

ASSISTANT = "assistant"
KEYS = ("messages", "conversations", "prompt", "completion", "system", "tools", *SIDES)
# ShareGPT's names of who speaks
ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT, "observation": "tool"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What was said, and where it stands. Of the assistant's messages those from `begin` on bear loss."""

    name: str  # it decides whether it is held out
    place: str  # for errors
    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    begin: int = 0
    side: str = ""  # of a preference pair: which of its answers this is


def conversations(section: DataSection) -> Iterator[Conversation]:
    """All conversations of a source in a fixed order, of pairs the chosen one before the rejected one.

    Raises ConfigError for rows that hold none.
    """
    read = _pair if is_pairs(section) else _conversation
    for path, name in named_files(section):
        before = 0
        for row in rows_of(path, KEYS) if path.suffix in ROW_SUFFIXES else ():
            if row.number != before + 1:
                raise ConfigError(f"{path}, line {before + 1}: empty", hint="a line is lost, or is to be taken out")
            yield from read(row, f"{name}#{row.number}")
            before = row.number


def _conversation(row: Row, name: str) -> Iterator[Conversation]:
    with _reading(row, "messages: [{role, content}, ..], conversations: [{from, value}, ..], or prompt and completion"):
        messages, begin = _messages(row.values)
        tools = _tools(row.values)
    if not any(message["role"] == ASSISTANT for message in messages[begin:]):
        raise ConfigError(
            f"{row.place}: the assistant says nothing", hint="take the row out, or see how it names roles"
        )
    yield Conversation(name, row.place, tuple(messages), tools, begin)


def _pair(row: Row, name: str) -> Iterator[Conversation]:
    """Loss is on what the two do not begin with in common."""
    with _reading(row, "prompt, chosen and rejected: texts, or [{role, content}, ..]", what="preference pair"):
        prompt = [*_turns(row.values.get("system") or [], "system"), *_turns(row.values.get("prompt") or [], "user")]
        both = [_turns(row.values[side], ASSISTANT) for side in SIDES]
        tools = _tools(row.values)
        if all(said[0]["role"] == ASSISTANT for said in both):
            both = [prompt + said for said in both]
    begin = 0
    while begin + 1 < min(map(len, both)) and both[0][begin] == both[1][begin]:
        begin += 1
    if not begin or any(said[begin]["role"] != ASSISTANT for said in both):
        raise ConfigError(
            f"{row.place}: chosen and rejected are no two answers to one prompt",
            hint="both begin with the same messages, or a prompt stands beside them; then the assistant speaks",
        )
    if not _stands_in(prompt, both[0][:begin]):
        raise ConfigError(
            f"{row.place}: chosen and rejected have another prompt than the row", hint="take one of the prompts out"
        )
    for side, said in zip(SIDES, both, strict=True):
        yield Conversation(name, row.place, tuple(said), tools, begin, side)


@contextmanager
def _reading(row: Row, shape: str, *, what: str = "conversation") -> Iterator[None]:
    """Whatever goes wrong with a row of another shape is raised as ConfigError."""
    if not isinstance(row.values, Mapping):
        raise ConfigError(f"{row.place}: no JSON object (a line that was cut short?)")
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{row.place}: no {what}", hint=shape) from None


def _tools(values: Mapping[str, Any]) -> list[Any] | None:
    tools = values.get("tools")
    return parse_json(tools) if isinstance(tools, str) else tools


def _stands_in(some: Sequence[Message], all_of: Sequence[Message]) -> bool:
    """Whether these messages are among those, one behind the other."""
    return any(all_of[k : k + len(some)] == some for k in range(len(all_of) - len(some) + 1))


def _messages(values: Mapping[str, Any]) -> tuple[list[Message], int]:
    """The messages, and how many of them are a prompt whose assistant bears no loss."""
    if "messages" in values:
        return [_message(dict(m)) for m in values["messages"]], 0
    if "conversations" in values:
        said = [_message({"role": m.get("from"), "content": m.get("value"), **m}) for m in values["conversations"]]
        return [*_turns(values.get("system") or [], "system"), *said], 0
    prompt = _turns(values["prompt"], "user")
    return [*prompt, *_turns(values["completion"], ASSISTANT)], len(prompt)


def _turns(said: Any, role: str) -> list[Message]:
    """A text as one message of a role, or messages as they are."""
    return [{"role": role, "content": said}] if isinstance(said, str) else [_message(dict(m)) for m in said]


def _message(message: Message) -> Message:
    """Without what is null, as transformers takes it."""
    role = message["role"]
    if not isinstance(role, str):
        raise TypeError(role)
    kept = {k: v for k, v in message.items() if v is not None and k not in ("from", "value")}
    return kept | {"role": ROLES.get(role, role)}
