"""hetctl as a process of its own, from this tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def hetctl(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hetctl", *words]
    return subprocess.run(argv, cwd=cwd, text=True, capture_output=True, check=False)


def hetctl_json(*words: str) -> subprocess.CompletedProcess[str]:
    """With its one document on stdout."""
    return hetctl(*words, "--json")
