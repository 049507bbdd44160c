"""A command on a terminal of its own, with what a person types into it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def on_a_terminal(*words: str, typed: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and all that `hetctl WORDS` shows; `typed` is there from the beginning."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "hetctl", *words]
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env={**os.environ, **(env or {})}
    )
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode(errors="replace")
