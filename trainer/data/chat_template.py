"""A model's chat template (Jinja), applied as transformers applies it, and what of a rendered conversation the
assistant says.

It says what `{% generation %}` marks. Where a template marks nothing, it says what a turn of its adds to the rendering
of the turns before it and the prompt to answer them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import parse_json, read_text
from hetctl.trainer.data.conversations import ASSISTANT, Conversation, Message
from hetctl.trainer.data.sources import MAX_TOKENIZER_BYTES, TEMPLATES, beside_tokenizer
from hetctl.trainer.recipe import CHATML, DataSection

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same, the first the usual one
BEGIN, END, WORD = (secrets.token_hex(8) for _ in range(3))  # around what is marked, until it is taken out; a word
NAME_ONE = f"data.template names another: a Jinja file, or {CHATML}"
BUILT_IN = {
    CHATML: "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans of characters [first, past_last) that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A template (or several: one for conversations with tools) and the special tokens that it may name."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        """Raises ConfigError for a text that is no template."""
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}", hint=NAME_ONE) from None
        self._special = special
        self._marks = {name: "endgeneration" in source for name, source in sources.items()}

    def rendered(self, talk: Conversation) -> Rendered:
        """A conversation, and what the assistant says in it. Raises ConfigError where that cannot be told."""
        text, spans = self._render(talk, len(talk.messages))
        if not self._marks[self._chosen(talk)]:
            spans = [self._added(talk, k, text) for k in _answers(talk)]
        elif talk.begin:
            spans = spans[len(self._render(talk, talk.begin)[1]) :]
        return Rendered(text, tuple(spans))

    def asked(self, question: str) -> str:
        """A person's only question, and the prompt to answer it. Raises ConfigError."""
        return self._render(_said_once(question), 1, prompt=True)[0]

    def closing(self) -> str:
        """What stands behind an answer. Raises ConfigError."""
        return self._behind(_said_once(WORD), 1)

    def _added(self, talk: Conversation, number: int, text: str) -> tuple[int, int]:
        """The span that one of the assistant's messages adds. Raises ConfigError where that cannot be told."""
        before, _ = self._render(talk, number, prompt=True)
        upto, _ = self._render(talk, number + 1)
        if not text.startswith(upto):  # the whole may be closed by the end token, whatever turn is its last
            upto = upto.removesuffix(self._special.get("eos_token", ""))
        if not (text.startswith(upto) and upto.startswith(before)):
            upto = before + self._answer(talk, number)
        if text.startswith(upto):
            return len(before), len(upto)
        raise ConfigError(
            f"{talk.place}: what the assistant says cannot be found: the chat template renders its turn {number + 1} "
            "otherwise as the last one than inside the whole",
            hint="mark it in the template with {% generation %}, and name that file as data.template; or give "
            "conversations of one answer",
        )

    def _answer(self, talk: Conversation, number: int) -> str:
        """A message as it stands where a template leaves thoughts out of all turns but the last: right behind the
        prompt, and closed as the last one is."""
        said = str(talk.messages[number].get("content", ""))
        return said + self._behind(talk, number)

    def _behind(self, talk: Conversation, number: int) -> str:
        """What stands behind one of the assistant's messages as the last one."""
        unlike = talk.messages[number] | {"content": WORD}
        marked, _ = self._render(replace(talk, messages=(*talk.messages[:number], unlike)), number + 1)
        return marked.partition(WORD)[2]

    def _render(self, talk: Conversation, count: int, *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The first `count` messages as text, with the prompt to answer them or without; and what is marked."""
        template = self._templates[self._chosen(talk)]
        messages = [_with_reasoning(message) for message in talk.messages[:count]]
        more = {"tools": talk.tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return _unmarked(template.render(messages=messages, **more, **self._special))
        except Exception as error:  # of a template's own code: whatever Python raises
            raise ConfigError(f"{talk.place}: the chat template fails: {error}", hint=NAME_ONE) from None

    def _chosen(self, talk: Conversation) -> str:
        return "tool_use" if talk.tools is not None and "tool_use" in self._templates else "default"


def find_template(section: DataSection) -> ChatTemplate:
    """The template that a recipe names, or that beside its tokenizer. Raises ConfigError where there is none."""
    beside = beside_tokenizer(section.tokenizer)
    texts = {path: read_text(path, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES) for path in beside}
    settings = [_values(path, text) for path, text in texts.items() if path.suffix == ".json"]
    about = {key: value for one in settings for key, value in one.items()}
    special = {key: _word(about[key]) for key in SPECIAL if about.get(key) is not None}
    if section.template != "auto":
        return ChatTemplate({"default": BUILT_IN.get(section.template) or _read(section.template)}, special)
    held = about.get("chat_template")
    named = {"default": held} if isinstance(held, str) else {t["name"]: t["template"] for t in held or ()}
    files = {_name(path): text for path, text in texts.items() if path.suffix == ".jinja"}
    if "default" not in (sources := files or named):
        raise ConfigError(f"the tokenizer {section.tokenizer} has no chat template", hint=NAME_ONE)
    return ChatTemplate(sources, special)


def _read(path: str) -> str:
    return read_text(Path(path), what="chat template", max_bytes=MAX_TOKENIZER_BYTES)


def _name(path: Path) -> str:
    return path.stem if path.parent.name == TEMPLATES else "default"


def _values(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(parse_json(text))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is not the JSON object that a tokenizer has") from None


def _word(token: Any) -> str:
    """A special token as it is written: a word, or an object with its content."""
    return str(token["content"] if isinstance(token, dict) else token)


def _said_once(text: str) -> Conversation:
    """A conversation of one question, and an answer."""
    return Conversation("", "a question", ({"role": "user", "content": text}, {"role": ASSISTANT, "content": ""}))


def _answers(talk: Conversation) -> list[int]:
    return [k for k, m in enumerate(talk.messages) if m["role"] == ASSISTANT and k >= talk.begin]


def _with_reasoning(message: Message) -> Message:
    """Under the names that templates look for, as transformers gives it."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where they were."""
    plain, spans = "", list[tuple[int, int]]()
    for number, piece in enumerate(text.split(BEGIN)):
        said, _, rest = piece.partition(END)
        if number:
            spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return plain, spans


class _Generation(Extension):
    """`{% generation %}` .. `{% endgeneration %}` around what a model is to say."""

    tags = {"generation"}  # noqa: RUF012 (so jinja wants it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: transformers' settings, filters and functions. They cannot reach Python."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what HTML must."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
