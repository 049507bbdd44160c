"""What docs/how-to says to type on one machine does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def typed(lines: str, folder: Path) -> str:
    """What the lines print, typed into a shell in that folder, which ends at the first that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_program_of_the_page_runs_across_islands(tmp_path: Path) -> None:
    (_, script), (_, commands), *_ = BLOCK.findall((DOCS / "how-to/own-script.md").read_text())
    (tmp_path / "script.py").write_text(script)
    shown = typed(commands.splitlines()[0], tmp_path)
    losses = re.findall(r"rank \d of 3: loss (\S+)", shown)
    assert len(losses) == 3
    assert len(set(losses)) == 1, "the same seed and summed gradients"


@pytest.mark.slow
def test_a_model_is_trained_exported_tuned_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, _, here = (DOCS / "how-to/fine-tuning.md").read_text().partition("## Try it here first")
    (tmp_path / "docs").symlink_to(DOCS)
    shown = typed(BLOCK.findall(here)[0][1], tmp_path)
    assert "fine-tuning the weights in" in shown
    assert "LlamaForCausalLM" in shown
