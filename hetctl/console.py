"""The one output sink. Commands hand it data; it knows people (rich on a terminal), plain text and `--json`.

With `--json` exactly one JSON document goes to stdout; everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rich.console import Console, RenderableType

from hetctl.comm.contract.errors import HetctlError, of_system
from hetctl.comm.contract.files import finite


class Sink:
    """Where a command's words go: `say` for people, `result` for the one document a script reads."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.people = _console(sys.stderr if as_json else sys.stdout)
        self.errors = _console(sys.stderr)

    @property
    def live(self) -> bool:
        """Whether moving pictures (progress) make sense where people look."""
        return self.people.is_terminal and not self.people.no_color

    def say(self, content: RenderableType = "", *, markup: bool = False) -> None:
        """A line, table or tree for people. A line stands as it is (paths may hold brackets) unless it is `markup`."""
        line = isinstance(content, str)  # it stays one when piped
        self.people.print(content, highlight=False, markup=markup if line else None, emoji=False, soft_wrap=line)

    def warn(self, sentence: str) -> None:
        """Something a person should know: a fallback, a doubt. Always on stderr."""
        self.errors.print(f"[yellow]note:[/] {_plain(sentence)}", highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[Callable[[str], None]]:
        """Say on stderr what takes a while; what is called with each part of it shows that, on a terminal."""
        if not self.errors.is_terminal:
            self.warn(what)
        with self.errors.status(what) as status:
            yield lambda part: status.update(f"{_plain(what)}: {_plain(part)}")

    def ask(self, question: str) -> str | None:
        """What a person answers, on a terminal; None where nobody can be asked, or nothing was said."""
        if self.as_json or not (sys.stdin.isatty() and self.errors.is_terminal):
            return None
        self.errors.print(f"{_plain(question)}: ", highlight=False, soft_wrap=True, end="")
        with contextlib.suppress(EOFError):
            return self.errors.input().strip() or None
        return None

    def result(self, document: Any) -> None:
        """The one JSON document of `--json`; nothing otherwise."""
        if self.as_json:
            sys.stdout.write(json.dumps(finite(document), indent=2, allow_nan=False) + "\n")
            sys.stdout.flush()

    def failure(self, error: HetctlError) -> None:
        """One block: a sentence, a hint, what else is known; with `--json` also the document, for scripts."""
        self.errors.print(f"[bold red]error:[/] {_plain(error.message)}", highlight=False, soft_wrap=True)
        if error.hint:
            self.errors.print(f"[bold]hint:[/] {_plain(error.hint)}", highlight=False, soft_wrap=True)
        for line in error.details:
            self.errors.print(_plain(line), highlight=False, soft_wrap=True)
        if not error.documented:
            self.result({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})


def _console(stream: Any) -> Console:
    plain = not stream.isatty() or "NO_COLOR" in os.environ
    width = None if stream.isatty() else 120
    return Console(file=stream, no_color=plain, force_terminal=False if plain else None, width=width)


def _plain(text: str) -> str:
    """Text as it stands: control characters dropped, rich's markup escaped."""
    clean = "".join(c for c in text if c in "\n\t" or (c.isprintable()))
    return clean.replace("[", "\\[")


def guarded(call: Callable[[], object], *, as_json: bool = False) -> None:
    """The one error boundary: what HetctlErrors and the system's say becomes a sentence, a hint and an exit code."""
    try:
        call()
    except HetctlError as error:
        _fail(error, as_json)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; nobody is left to tell
        sys.exit(1)
    except OSError as error:
        _fail(of_system(error), as_json)


def _fail(error: HetctlError, as_json: bool) -> NoReturn:
    Sink(as_json=as_json).failure(error)
    sys.exit(error.exit_code)
