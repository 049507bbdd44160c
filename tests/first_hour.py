"""The first hour with a stopwatch: a fresh clone under a fresh account, by the lines of README alone, on this machine.

    python -m tests.first_hour [--json FILE]

As root the account is a new user, removed afterwards; otherwise a new HOME. It ends with a trained model, an exported
folder that transformers loads, and the report in a browser that nobody sees (chromium; without one the page is read).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOAD = "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('my-model').num_parameters())"
SAID = ("make demo", "export PATH=$PWD/.venv/bin:$PATH", "hetctl export --to my-model", "runs/latest/report.html")
LIMIT_S = 600
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Account:
    """Somebody with nothing but a home."""

    home: Path
    enter: tuple[str, ...]  # what comes before a command

    def do(self, line: str) -> str:
        """What a line of the shell prints, in the clone once there is one. Raises SystemExit where it fails."""
        where = self.home / "hetctl"
        pip = [f"{k}={v}" for k, v in os.environ.items() if k.startswith("PIP_") or k.endswith("_proxy")]
        words = [
            *self.enter,
            "env",
            "-i",
            f"HOME={self.home}",
            f"TMPDIR={self.home}",
            f"PATH={PATH}",
            *pip,
            "sh",
            "-c",
            line,
        ]
        cwd = where if where.exists() else self.home
        done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"$ {line}\n{done.stdout[-4000:]}\nexit code {done.returncode}")
        return done.stdout


@contextlib.contextmanager
def account() -> Iterator[Account]:
    """A new user as root, otherwise a new home; gone afterwards."""
    if os.geteuid() != 0 or not shutil.which("useradd"):
        with tempfile.TemporaryDirectory() as home:
            yield Account(Path(home), ())
        return
    name = f"hetctl{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--base-dir", "/tmp", name], check=True)
    try:
        yield Account(Path("/tmp") / name, ("runuser", "-u", name, "--"))
    finally:
        subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)


def opened(folder: str) -> str:
    """The line that opens a run's report as a browser does."""
    page = f"$PWD/{folder}"
    browser = f"{CHROMIUM} --headless --no-sandbox --disable-gpu --virtual-time-budget=3000 --dump-dom"
    return f'{browser} "file://{page}"' if CHROMIUM else f'cat "{page}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there")
    asked, seconds = parser.parse_args(), dict[str, float]()
    demo, path, export, report = SAID
    readme = (ROOT / "README.md").read_text()
    for words in SAID:
        assert words in readme, f"README does not say: {words}"
    steps = {
        "git clone": "git clone -q hetctl.bundle hetctl",
        demo: demo,
        "export": f"{path}; {export}",
        "transformers loads it": f'{path}; python -c "{LOAD}"',
        "the report in a browser": opened(report),
    }
    with account() as newcomer:
        subprocess.run(["git", "bundle", "create", "-q", newcomer.home / "hetctl.bundle", "HEAD"], cwd=ROOT, check=True)
        for name, line in steps.items():
            began = time.monotonic()
            printed = newcomer.do(line)
            assert name != demo or "next: hetctl export" in printed, "the demo does not say what to type next"
            seconds[name] = round(time.monotonic() - began, 1)
            print(f"{seconds[name]:7.1f} s  {name}", flush=True)
    total = sum(seconds.values())
    assert "<canvas" in printed or not CHROMIUM, "the report has no picture of the losses"
    print(f"{total:7.1f} s  all, on {len(os.sched_getaffinity(0))} cores")
    if asked.json:
        asked.json.write_text(json.dumps({**seconds, "all": round(total, 1)}) + "\n")
    sys.exit(f"longer than {LIMIT_S} s" if total > LIMIT_S else 0)


if __name__ == "__main__":
    main()
