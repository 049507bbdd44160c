"""The house keeps its shape: links, layers, where vendor names may stand, and a quick start."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetctl.comm.contract.natives import HOST, NATIVES

ROOT = Path(__file__).parent.parent
FOLDERS = ("comm", "launcher", "trainer")
# The rooms, floor by floor: each imports only from those before it. A room is a folder, or a file that has none
ROOMS = (
    *("comm.contract", "comm.operation", "comm.bridge", "comm.group", "comm.bench"),
    *("data", "ddp", "torchft", "torchcomms"),
    *(
        "launcher.agent",
        "launcher.hosts",
        "launcher.ssh",
        "launcher.engines",
        "launcher.run_folder",
        "launcher.supervisor",
    ),
    *(
        "trainer.schedule",
        "trainer.families",
        "trainer.model",
        "trainer.ranks",
        "trainer.recipe",
        "trainer.job",
        "trainer.data",
        "trainer.pipeline",
    ),
    *("trainer.planning", "trainer.gradients", "trainer.checkpoint", "trainer.adapt", "trainer.loop", "trainer.bench"),
    *("trainer.__main__", "console", "probe", "discovery", "render", "doctor", "runs", "bench", "validate"),
    *("commands", "app", "__main__"),
)
APART = (
    {"launcher", "trainer"},
    {"doctor", "runs"},
    {"doctor", "bench"},
    {"runs", "bench"},
)  # know nothing of each other
HETCTL_ROOMS = {room for room in ROOMS if "." not in room}
VENDOR_WORDS = re.compile(rf"[\"']({'|'.join(NATIVES.keys() - {HOST})})[\"']", re.IGNORECASE)
VENDOR_FILES = ("comm/contract/natives.py", "hetctl/probe/vendors/")


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


@pytest.mark.parametrize("name", FOLDERS)
def test_packages_are_links_to_the_top_folders(name: str) -> None:
    link = ROOT / "hetctl" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.is_dir()
    assert not (ROOT / name / "__init__.py").exists()


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name below `hetctl`."""
    found = {}
    for folder in ("hetctl", *FOLDERS):
        for path in sources(folder):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder != "hetctl" or parts[1] not in FOLDERS:
                found[".".join(parts[folder == "hetctl" :]).removesuffix(".__init__")] = path
    return found


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] in HETCTL_ROOMS else ".".join(parts[:2])


def imported(path: Path) -> set[str]:
    """What a module imports of ours, by its dotted name below `hetctl`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {name.removeprefix("hetctl.") for name in names if name.startswith("hetctl.")}
    return found


def test_every_module_is_in_a_room() -> None:
    faces = {"__init__", ""}  # the package's own
    assert {room_of(name) for name in modules()} - faces <= {*ROOMS, "hetctl"}


def test_rooms_import_one_way_only() -> None:
    floors = {room: number for number, room in enumerate(ROOMS)}
    for name, path in modules().items():
        for other in imported(path):
            mine, theirs = room_of(name), room_of(other)
            if mine in floors and theirs in floors:
                assert floors[theirs] <= floors[mine], f"{name} imports {other}"
                assert {mine.split(".")[0], theirs.split(".")[0]} not in APART, f"{name} imports {other}"


def test_no_modules_import_in_a_circle() -> None:
    known = modules()
    needs = {name: {found for one in imported(path) for found in owners(one, known)} for name, path in known.items()}
    while free := [name for name, others in needs.items() if not others & needs.keys() - {name}]:
        for name in free:
            del needs[name]
    assert not needs, f"in circles: {sorted(needs)}"


def owners(name: str, known: dict[str, Path]) -> set[str]:
    """The module that an imported name is, or stands in."""
    return {name} & known.keys() or {name.rpartition(".")[0]} & known.keys()


def test_only_one_folder_knows_paramiko() -> None:
    for folder in ("hetctl", *FOLDERS):
        for path in (p for p in sources(folder) if folder != "hetctl" or not set(p.parts) & set(FOLDERS)):
            if not path.relative_to(ROOT).as_posix().startswith("launcher/ssh/"):
                assert not re.search(r"^\s*(import|from) paramiko", path.read_text(), re.MULTILINE), path


def test_vendor_names_stand_only_where_they_belong() -> None:
    for folder in ("hetctl", *FOLDERS):
        for path in (p for p in sources(folder) if folder != "hetctl" or not set(p.parts) & set(FOLDERS)):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith(VENDOR_FILES):
                found = VENDOR_WORDS.search(path.read_text())
                assert found is None, f"{relative} names a vendor: {found and found.group()}"


def test_help_starts_without_heavy_packages() -> None:
    program = (
        "import sys, hetctl.app\n"
        "from typer.testing import CliRunner\n"
        "result = CliRunner().invoke(hetctl.app.app, ['--help'])\n"
        "assert result.exit_code == 0 and 'train' in result.output\n"
        "heavy = {'torch', 'paramiko', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_help_is_not_slower_than_a_few_bare_starts() -> None:
    """A ratio of CPU seconds: machines differ, and are busy."""

    def best(argv: list[str]) -> float:
        times = []
        for _ in range(4):
            begin = os.times()
            subprocess.run([sys.executable, *argv], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            ended = os.times()
            times.append(sum(ended[2:4]) - sum(begin[2:4]))  # user and system, of children
        return min(times)

    bare = best(["-c", "import typer, rich.console, rich.panel, rich.table"])
    assert best(["-m", "hetctl", "--help"]) < 3.5 * bare
