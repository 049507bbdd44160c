"""The documents hold what they say: commands parse, paths exist, tables and pictures are what their sources make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from hetctl.app import app
from hetctl.comm.contract.cluster import load_cluster
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe
from tests import room_imports
from tests.bench import benchmark_tables, device_reference, file_reference, recordings_table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
CODE = re.compile(r"^```(\w*)\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s$])(hetctl [a-z].*)")
FOLDERS = r"(?:hetctl|launcher|trainer|comm|tests|docs)"
PATH = re.compile(rf"(?<![\w/~.<*-]){FOLDERS}/[\w./-]*\w")
COMMAND_LINE = typer.main.get_command(app)
LINK = re.compile(r"\]\(([^)#:]+)\)")


def code(page: Path) -> Iterator[str]:
    """Every line of a page's code blocks (of a console: what is typed, to its first pipe), and what stands between
    backticks."""
    for kind, block, span in CODE.findall(page.read_text()):
        lines = (block or span).splitlines()
        yield from [line.split(" | ")[0] for line in lines if line.startswith("$ ")] if kind == "console" else lines


def commands(line: str) -> Iterator[str]:
    """The hetctl commands of a line, alternatives one by one, without explanations (after two spaces, # or →)."""
    for found in COMMAND.findall(line):
        said = re.split(r"\s{2,}|\s#\s|→|;", found)[0]
        first, *others = re.split(r"\s?\|\s?", re.sub(r"\s\[[^\]]*\]|\s\.\.\.(?=\s|$)", "", said))
        yield first
        yield from (f"{first.rpartition(' ')[0]} {other}" for other in others)


COMMANDS = sorted({(page.name, c) for page in PAGES for line in code(page) for c in commands(line)})


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_every_command_of_the_documents_is_one_of_the_command_line(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    command = COMMAND_LINE
    context = command.context_class(command, info_name="hetctl")
    while inside := getattr(command, "commands", None):  # a group of commands
        assert words[0] in inside, f"{page}: {line}: no command '{words[0]}'"
        command = inside[words.pop(0)]
        context = command.context_class(command, info_name=command.name, parent=context)
        if not words:  # the name of a command, without what it is given
            return
    command.make_parser(context).parse_args(words)  # unknown options and missing values raise


def test_the_commands_of_the_documents_were_found() -> None:
    assert len(COMMANDS) > 60
    assert ("README.md", "hetctl train recipe.yaml --cluster cluster.yaml") in COMMANDS
    assert list(commands("hetctl bench pipeline | links    both")) == ["hetctl bench pipeline", "hetctl bench links"]


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: page.name)
def test_every_path_of_the_documents_exists(page: Path) -> None:
    text = page.read_text()
    for path in PATH.findall(text):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), f"{page.name} names {path}"
    for link in LINK.findall(text):
        assert (page.parent / link).exists(), f"{page.name} leads to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_of_the_documents_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page):
        for target in re.findall(r"\bmake ([a-z][a-z-]+)", line):
            assert target in targets, f"{page.name} names make {target}"


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_decisions_keep_to_a_dozen_lines(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120


def test_benchmarks_are_what_the_records_make() -> None:
    for path, text in benchmark_tables.made().items():
        assert path.exists(), f"{path.name} was not made: make benchmarks"
        assert path.read_text() == text, f"{path.name} is not what the records make: make benchmarks"


def test_the_reference_of_the_cluster_file_is_what_the_code_reads(tmp_path: Path) -> None:
    for page in (file_reference, device_reference):
        assert page.PAGE.read_text() == page.made(), "make reference"
    [example] = re.findall(r"```yaml\n(.*?)```", file_reference.HEAD, re.DOTALL)
    (tmp_path / "cluster.yaml").write_text(example)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert {r.island for r in make_plan(cluster, load_recipe(None)).ranks} == {"h100", "mi300x"}


def test_the_table_of_tools_is_what_the_recordings_make() -> None:
    page = recordings_table.PAGE.read_text()
    assert page == recordings_table.with_table(page), "make reference"


def test_the_picture_of_the_rooms_is_today_s() -> None:
    page = room_imports.PAGE.read_text()
    assert page == room_imports.with_picture(page), (
        "rooms import each other otherwise now: python -m tests.room_imports"
    )


def test_every_room_is_described_and_every_described_room_exists() -> None:
    found = re.findall(r"`([a-z_]+/[a-z_]+)(?:\.py)?`", _section("The rooms"))
    assert {path.replace("/", ".") for path in found} - {"hetctl.app"} == set(room_imports.rooms())


def test_every_class_among_the_words_exists() -> None:
    source = "\n".join(p.read_text() for top in room_imports.FOLDERS for p in (ROOT / top).rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)`", _section("The words")):
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"no class {name}"


def _section(title: str) -> str:
    """The text of a section of docs/architecture.md."""
    headings = [*re.finditer(r"^## (.*)$", page := room_imports.PAGE.read_text(), re.MULTILINE)]
    ends = [h.start() for h in headings[1:]] + [len(page)]
    return next(page[h.end() : end] for h, end in zip(headings, ends, strict=True) if h.group(1) == title)
