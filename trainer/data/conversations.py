"""Conversations: rows of a source as the messages that chat templates take, whatever shape they are written in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.data.sources import named_files
from hetctl.trainer.data.tables import ROW_SUFFIXES, Row, rows_of
from hetctl.trainer.recipe import DataSection

ASSISTANT = "assistant"
KEYS = ("messages", "conversations", "prompt", "completion", "system", "tools")
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


def conversations(section: DataSection) -> Iterator[Conversation]:
    """All conversations of a source in a fixed order. Raises ConfigError for rows that hold none."""
    for path, name in named_files(section):
        before = 0
        for row in rows_of(path, KEYS) if path.suffix in ROW_SUFFIXES else ():
            if row.number != before + 1:
                raise ConfigError(f"{path}, line {before + 1}: empty", hint="a line is lost, or is to be taken out")
            yield _conversation(row, f"{name}#{row.number}")
            before = row.number


def _conversation(row: Row, name: str) -> Conversation:
    if not isinstance(row.values, Mapping):
        raise ConfigError(f"{row.place}: no JSON object (a line that was cut short?)")
    try:
        messages, begin = _messages(row.values)
        tools = row.values.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"{row.place}: no conversation",
            hint="messages: [{role, content}, ..], conversations: [{from, value}, ..], or prompt and completion",
        ) from None
    if not any(message["role"] == ASSISTANT for message in messages[begin:]):
        raise ConfigError(
            f"{row.place}: the assistant says nothing", hint="take the row out, or see how it names roles"
        )
    return Conversation(name, row.place, tuple(messages), tools, begin)


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
