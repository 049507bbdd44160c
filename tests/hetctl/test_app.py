"""The command line itself, as somebody types it who has just installed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from hetctl import __version__
from hetctl.app import app


def test_the_version_is_said_without_a_command() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"hetctl {__version__}\n")


def test_every_command_says_what_it_takes() -> None:
    found = list(typed(typer.main.get_command(app)))
    assert ["bench", "ops"] in found
    for words in found:
        done = CliRunner().invoke(app, [*words, "-h"])
        assert (done.exit_code, "Usage:" in done.output) == (0, True), (words, done.output)


def typed(command: Any, *words: str) -> Iterator[list[str]]:
    """What may be typed to come to a command or a group of them."""
    yield [*words]
    for name, below in getattr(command, "commands", {}).items():
        yield from typed(below, *words, name)
