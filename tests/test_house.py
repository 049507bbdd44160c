"""The house keeps its shape: links, layers, where vendor names may stand, and a quick start."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("comm", "launcher", "trainer")
MAY_IMPORT = {
    "comm": {"comm"},
    "launcher": {"launcher", "comm"},
    "trainer": {"trainer", "comm"},
}
VENDOR_WORDS = re.compile(r"[\"'](nvidia|amd|intel)[\"']", re.IGNORECASE)
VENDOR_FILES = ("comm/contract/natives.py", "trainer/planning/hardware.py", "hetctl/probe/vendors/")


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


@pytest.mark.parametrize("name", FOLDERS)
def test_packages_are_links_to_the_top_folders(name: str) -> None:
    link = ROOT / "hetctl" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.is_dir()
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_hold(folder: str) -> None:
    for path in sources(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] == "hetctl":
                    assert name.split(".")[1] in MAY_IMPORT[folder], f"{path} imports {name}"


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
    """A ratio, measured side by side: machines differ, and are noisy."""

    def best(argv: list[str]) -> float:
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *argv], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - begin)
        return min(times)

    bare = best(["-c", "import typer, rich.console, rich.panel, rich.table"])
    assert best(["-m", "hetctl", "--help"]) < 3.5 * bare
