"""Which tokens end what a model says: the end of a text, what its makers name, and what closes an assistant's turn."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import parse_json, read_text
from hetctl.comm.contract.units import MiB
from hetctl.trainer.data.sources import is_chat, settings_beside
from hetctl.trainer.data.tokenizer import Tokenizer
from hetctl.trainer.recipe import DataSection


def holds_chats(data: DataSection) -> bool:
    """Whether conversations are among what is trained on. Raises ConfigError for what cannot be read."""
    return any(map(is_chat, data.each))


def end_tokens(data: DataSection, tokenizer: Tokenizer, *, chat: bool) -> frozenset[int]:
    """The tokens that end a continuation; of a `chat` those that end a turn too. Raises ConfigError."""
    closing = _closing(data, tokenizer) if chat else ()
    return frozenset((tokenizer.end, *_named(settings_beside(data.tokenizer)), *closing))


def _named(file: Path | None) -> list[int]:
    """Its `eos_token_id`: one, several, or none."""
    if file is None:
        return []
    try:
        values = parse_json(read_text(file, what="model's settings", max_bytes=MiB))
        found = values.get("eos_token_id")
        return [int(token) for token in (found if isinstance(found, list) else [found]) if token is not None]
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{file}: eos_token_id is no token, nor a list of such", hint="fetch the file anew") from None


def _closing(data: DataSection, tokenizer: Tokenizer) -> list[int]:
    """The token that the chat template puts behind an answer, if it is one: bytes spell theirs."""
    from hetctl.trainer.data.chat_template import find_template  # jinja2, which texts do without

    closing = tokenizer.encode(find_template(data).closing().strip()).tolist()
    special = closing and not tokenizer.decode(closing[:1])
    return closing[:1] if special or len(closing) == 1 else []
