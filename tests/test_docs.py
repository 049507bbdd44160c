"""The documents hold what they say: commands parse, paths exist, tables and pictures are what their sources make."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster, load_cluster
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.values import decode
from hetctl.discovery.inventory import load_inventory
from hetctl.discovery.inventory_file import InventoryFile
from hetctl.trainer.planning.own_hardware import own_classes
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import Recipe, load_recipe
from tests import room_imports
from tests.bench import benchmark_tables
from tests.reference import fields, pages, pictures
from tests.test_house import modules

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*DECISIONS}))
CODE = re.compile(r"^```(\w*)\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s$])(hetctl [a-z].*)")
FOLDERS = r"(?:hetctl|launcher|trainer|comm|tests|docs)"
PATH = re.compile(rf"(?<![\w/~.<*-]){FOLDERS}/[\w./-]*\w")
COMMAND_LINE = typer.main.get_command(app)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)")


def code(page: Path) -> Iterator[str]:
    """Every line of a page's code blocks (of a console: what is typed, to its first pipe), and what stands between
    backticks."""
    for kind, block, span in CODE.findall(page.read_text()):
        lines = (block or span).splitlines()
        yield from [line.split(" | ")[0] for line in lines if line.startswith("$ ")] if kind == "console" else lines


def commands(line: str) -> Iterator[str]:
    """The hetctl commands of a line, alternatives one by one, without explanations (after two spaces, # or →)."""
    for found in COMMAND.findall(line):
        said = re.split(r"\s{2,}|\s#\s|→|;\s", found)[0]
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


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: page.name)
def test_every_link_of_the_documents_leads_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        there = (page.parent / path) if path else page
        assert there.is_file(), f"{page.name} leads to {path}"
        assert not anchor or anchor in anchors(there), f"{page.name} leads to {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    blocks = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = (re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.*)$", blocks, re.MULTILINE))
    return {head.replace(" ", "-") for head in words}


YAML = [(page, block) for page in PAGES for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)]


@pytest.mark.parametrize(("page", "block"), YAML, ids=[page.name for page, _ in YAML])
def test_every_yaml_of_the_documents_is_what_its_file_may_hold(page: Path, block: str, tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(block)
    keys = yaml.safe_load(block).keys()
    if "apiVersion" in keys:
        pytest.skip("a manifest of Kubernetes: its schema is KubeRay's, which does not come with the tests")
    if "model" in keys:
        decode(Recipe, yaml.safe_load(block), where=page.name)
    elif "islands" in keys:
        load_cluster(file)
    elif "devices" in keys:
        assert own_classes(file)
    else:
        assert load_inventory(file).entries


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_of_the_documents_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page):
        for target in re.findall(r"\bmake ([a-z][a-z/-]+)", line):
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


MADE = pages.made()


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_references_are_what_the_code_makes(page: Path) -> None:
    assert page.read_text() == MADE[page], "make reference"


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_nothing_of_a_reference_is_left_without_words(page: Path) -> None:
    head = re.compile(r"\| (?:key|variable|argument or option|code) ")
    for block in filter(head.match, MADE[page].split("\n\n")):
        for row in block.splitlines()[2:]:
            assert "](#" in row or not row.endswith("|  |"), row


@pytest.mark.parametrize("top", [Cluster, Plan, Recipe, InventoryFile])
def test_every_key_of_a_file_has_its_row(top: type) -> None:
    made = {
        Cluster: fields.cluster,
        Plan: fields.plan,
        Recipe: fields.recipe,
        InventoryFile: fields.inventory,
    }[top]()
    for cls in fields.below(top):
        for key in cls.__dataclass_fields__ if top is not Recipe or cls is not Recipe else ():
            assert f"| `{key}` |" in made, f"{cls.__name__}.{key}"


UNDER = re.compile(r"!\[[^\]]*\]\((concepts-\w+\.svg)\)\n\n```\n(hetctl .*)\n```")
DRAWN = UNDER.findall((ROOT / "docs/concepts.md").read_text())


@pytest.mark.parametrize(("name", "line"), DRAWN, ids=[name for name, _ in DRAWN])
def test_the_command_under_a_picture_draws_it(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "plan.html").read_text()
    assert any(body in MADE[ROOT / "docs" / name] for _, body in pictures.drawn_in(page))


def test_every_picture_of_the_concepts_has_its_command() -> None:
    assert {ROOT / "docs" / name for name, _ in DRAWN} == {p for p in MADE if p.name.startswith("concepts-")}


def test_the_example_of_a_cluster_file_is_planned_for(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", fields.CLUSTER, re.DOTALL)
    (tmp_path / "cluster.yaml").write_text(example)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert {r.island for r in make_plan(cluster, load_recipe(None)).ranks} == {"h100", "mi300x"}


def test_the_picture_of_the_rooms_is_today_s() -> None:
    page = room_imports.PAGE.read_text()
    assert page == room_imports.with_picture(page), (
        "rooms import each other otherwise now: python -m tests.room_imports"
    )


def test_every_room_is_described_and_every_described_room_exists() -> None:
    found = re.findall(r"`([a-z_]+/[a-z_]+)(?:\.py)?`", _section("The rooms"))
    assert {path.replace("/", ".") for path in found} - {"hetctl.app"} == set(room_imports.rooms())


def test_every_message_of_the_troubleshooting_is_one_of_the_code() -> None:
    """What stands for other words (…) may be any; all else is within one text of the sources."""
    texts = [text for path in modules().values() for text in _texts(ast.parse(path.read_text()))]
    rows = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for said in rows:
        pattern = re.compile(".*".join(re.escape(part) for part in said.split("…")), re.DOTALL)
        assert any(map(pattern.search, texts)), f"nothing says: {said}"


def _texts(tree: ast.Module) -> Iterator[str]:
    """Every text of a source; of those with values in them the words around these."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "…".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_glossary_is_in_order_and_names_classes_that_exist() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    words = [head.lower() for head in re.findall(r"^## (.*)$", page, re.MULTILINE)]
    assert words == sorted(set(words)), "one meaning a word, in the order of the alphabet"
    source = "\n".join(p.read_text() for top in room_imports.FOLDERS for p in (ROOT / top).rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)`", page):
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"no class {name}"


def _section(title: str) -> str:
    """The text of a section of docs/architecture.md."""
    headings = [*re.finditer(r"^## (.*)$", page := room_imports.PAGE.read_text(), re.MULTILINE)]
    ends = [h.start() for h in headings[1:]] + [len(page)]
    return next(page[h.end() : end] for h, end in zip(headings, ends, strict=True) if h.group(1) == title)
