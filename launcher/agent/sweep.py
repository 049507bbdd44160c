"""Half-made files that a run's dead ranks left: removed once nothing of the run writes there any more.

Standard library only: agents and their guardians use it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Iterable

FILE = "sweep.json"  # in an agent's folder, so that its guardian knows the patterns, too


def sweep(patterns: Iterable[str]) -> None:
    """Remove what the patterns match, files and folders."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def sweep_for(folder: str) -> None:
    """Sweep what an agent noted in its folder."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, FILE), encoding="utf-8") as file:
        sweep(json.load(file))
