"""The one output sink. Commands hand it data; it knows people (rich on a terminal), plain text and `--json`.

With `--json` exactly one JSON document goes to stdout; everything else goes to stderr. While ranks run, what nobody
reads is dropped: the run goes on without its reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.comm.contract.errors import HetctlError, of_system
from hetctl.comm.contract.files import finite

MOST_UNREAD = 4096  # pieces of output (lines, tables) that wait for a slow reader
PATIENCE_S = 10.0  # without a piece read: then the reader is taken for gone


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
        if isinstance(content, Table) and not _fits(content, self.people):
            content.box = None
            content = content if _fits(content, self.people) else _as_lines(content)
        line = isinstance(content, (str, Text))  # it stays one when piped
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

    @contextlib.contextmanager
    def outliving_readers(self) -> Iterator[None]:
        """No stream that breaks, fills up or is not read delays or ends what is done in here."""
        consoles, writers = (self.people, self.errors), dict[object, UnhurriedWriter]()
        files = [console.file for console in consoles]
        for console, file in zip(consoles, files, strict=True):
            key = _identity(file)
            if key not in writers:  # of one file one writer keeps the order
                writers[key] = UnhurriedWriter(cast(TextIO, file))
            writers[key].streams.append(cast(TextIO, file))
            console.file = cast(TextIO, writers[key])
        try:
            yield
        finally:
            for console, file in zip(consoles, files, strict=True):
                console.file = file
            for writer in writers.values():
                writer.close()

    def await_reader(self) -> None:
        """Wait until people's stream takes more, where its reader is alive: for threads with much to show."""
        if isinstance(writer := self.people.file, UnhurriedWriter):
            writer.await_room()

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


class UnhurriedWriter:
    """A text stream whose `write` never blocks and never fails: a thread writes, and what nobody reads is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._gone, self._dropped = stream, False, 0
        self.streams: list[TextIO] = []  # all that write to this file
        self._items: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()  # signal handlers may put
        self._progress = time.monotonic()
        self.encoding = stream.encoding
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, text: str) -> int:
        if self._items.empty():
            self._progress = time.monotonic()
        if self._items.qsize() < MOST_UNREAD and not self._gone:
            self._items.put(text)
        else:
            self._dropped += 1
        return len(text)

    def flush(self) -> None:
        """The thread does, after each piece."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def await_room(self) -> None:
        """Wait while a reader that is alive is behind."""
        while self._items.qsize() > MOST_UNREAD // 2 and not self._stuck:
            time.sleep(0.02)

    def close(self) -> None:
        """Wait for what is left to be read. A stream that nobody reads any more takes no further word of anyone."""
        over = threading.Event()
        self._progress = time.monotonic()
        self._items.put(over)
        with contextlib.suppress(KeyboardInterrupt):  # somebody has seen enough
            while not over.wait(0.1) and not self._stuck:
                pass
        if self._gone or not over.is_set():
            self._gone = True
            silence(*self.streams)

    @property
    def _stuck(self) -> bool:
        return self._gone or time.monotonic() - self._progress > PATIENCE_S

    def _run(self) -> None:
        while True:
            item = self._items.get()
            if isinstance(item, threading.Event):
                item.set()
                return
            if self._gone:
                continue
            try:
                self._put(item)
                if self._dropped:
                    count, self._dropped = self._dropped, 0
                    self._put(f"[{count} lines were not read in time, and are not shown]\n")
            except (OSError, ValueError):  # ValueError: closed
                self._gone = True

    def _put(self, text: str) -> None:
        """By the descriptor where there is one: a thread stuck in a buffered file would keep its lock to the end."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, AttributeError):
            self._stream.write(text)
            self._stream.flush()
            return
        left = memoryview(text.encode(self.encoding or "utf-8", errors="replace"))
        while left and not self._gone:
            try:
                left = left[os.write(descriptor, left) :]
                self._progress = time.monotonic()
            except BlockingIOError:  # somebody made it so, an ssh that shares it
                select.select([], [descriptor], [], 1.0)


def silence(*streams: Any) -> None:
    """Send what is still written to streams nowhere, so that neither it nor the interpreter's last flush fails."""
    for stream in streams:
        with contextlib.suppress(OSError, AttributeError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


class _Console(Console):
    """rich's, which would end the program with exit code 1 where its reader went away: that is for `guarded` to say."""

    def on_broken_pipe(self) -> None:
        raise


def _identity(stream: Any) -> object:
    """What tells two open files apart, whichever descriptors name them."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, AttributeError, ValueError):
        return id(stream)
    return status.st_dev, status.st_ino


def _console(stream: Any) -> Console:
    plain = not stream.isatty() or "NO_COLOR" in os.environ
    width = None if stream.isatty() else 120
    return _Console(file=stream, no_color=plain, force_terminal=False if plain else None, width=width)


def _fits(table: Table, console: Console) -> bool:
    """Whether no word of it is cut: rich does that before it has made all columns as narrow as they could be."""
    return not any("…" in segment.text for segment in console.render(table))


def _as_lines(table: Table) -> Text:
    """A line for each row, its cells named, of a table that a narrow terminal would cut."""
    heads = [_cell(column.header) if table.show_header else Text() for column in table.columns]
    lines = [_cell(table.title)] if table.title else []
    for row in zip(*(map(_cell, column.cells) for column in table.columns), strict=True):
        named = [Text(" ").join(filter(None, (head, cell))) for head, cell in zip(heads, row, strict=True) if cell]
        lines.append(Text(", " if table.show_header else " ").join(named))
    return Text("\n").join([*lines, *([_cell(table.caption)] if table.caption else [])])


def _cell(content: Any) -> Text:
    return content if isinstance(content, Text) else Text.from_markup(str(content), emoji=False)


def _plain(text: str) -> str:
    """Text as it stands: control characters dropped, rich's markup escaped."""
    clean = "".join(c for c in text if c in "\n\t" or (c.isprintable()))
    return clean.replace("[", "\\[")


def guarded(call: Callable[[], object], *, as_json: bool = False) -> None:
    """The one error boundary: what HetctlErrors and the system's say becomes a sentence, a hint and an exit code.

    TERM ends the call as an exception does: what it opened elsewhere, pods that wait for a node, is closed.
    """
    signal.signal(signal.SIGTERM, _ended)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        call()
    except HetctlError as error:
        _fail(error, as_json)
    except BrokenPipeError:
        silence(sys.stdout, sys.stderr)  # the reader went away; nobody is left to tell
        sys.exit(1)
    except OSError as error:
        _fail(of_system(error), as_json)


def _ended(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _fail(error: HetctlError, as_json: bool) -> NoReturn:
    try:
        Sink(as_json=as_json).failure(error)
    except OSError:  # nobody reads it: the exit code is left to say it
        silence(sys.stdout, sys.stderr)
    sys.exit(error.exit_code)
