"""`--detach`: the same command again in a session of its own, its words in the run folder, this one free to go."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import WorkFailed
from hetctl.console import Sink
from hetctl.launcher.run_folder.registry import active
from hetctl.launcher.run_folder.folder import create_run

START_S = 120.0
CONSOLE = "console.log"


def detach(words: list[str], run_dir: Path | None, *, label: str, sink: Sink) -> dict[str, Any]:
    """Start `hetctl WORDS` in the background and return once its hosts are being entered.

    Raises WorkFailed with its last words when it ends before that.
    """
    folder = create_run(run_dir, label)
    cut = words.index("--") if "--" in words else len(words)
    own = [w for w in words[:cut] if w not in ("--detach", "--json")]
    argv = [sys.executable, "-m", "hetctl", *own, "--run-dir", str(folder.path), *words[cut:]]
    console = folder.path / CONSOLE
    with console.open("wb") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + START_S
    while not any(r.pid == child.pid and r.supervised for r in active()):
        if child.poll() is not None or time.monotonic() > until:
            if child.returncode == 0:
                break
            said = console.read_text(errors="replace").strip().splitlines()[-3:]
            raise WorkFailed(f"the run did not start: {' / '.join(said)}", hint=f"see {console}")
        time.sleep(0.1)
    sink.say(f"{folder.name} runs in the background: hetctl logs -f {folder.path}, hetctl stop {folder.name}")
    return {"run": folder.name, "pid": child.pid, "run_dir": str(folder.path), "console": str(console)}
