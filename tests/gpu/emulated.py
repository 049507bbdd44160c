"""One `hetctl train` on emulated islands of this machine, as the checks on GPUs run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def gpu_of(rank: int) -> torch.device:
    """A rank's GPU; islands share them where there are fewer than ranks, but not more than an island has."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def train(
    folder: Path,
    spec: str,
    settings: Iterable[str],
    *,
    plan: Path | None = None,
    seconds: float = 400,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The run's summary, with the `records` of its steps; `folder` becomes its run folder, `plan` stands for `spec`.

    Raises RuntimeError with the last that it and its ranks said.
    """
    where = ["--emulate", spec] if plan is None else ["--plan", str(plan)]
    argv = [sys.executable, "-m", "hetctl", "train", *where, "--json", "--run-dir", str(folder)]
    argv += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds, env=env)
    if done.returncode:
        logs = [path.read_text()[-1500:] for path in sorted((folder / "logs").glob("rank-*.log"))]
        raise RuntimeError("\n".join([done.stderr[-2000:], *logs]))
    found: dict[str, Any] = json.loads(done.stdout)
    found["records"] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return found
