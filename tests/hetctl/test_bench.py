"""`hetctl bench bridge`: one document with every way between two emulated islands, and refusals before ranks start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetctl", "bench", "bridge", *argv]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)


def test_a_bridge_is_measured_beside_native_and_raw_ways() -> None:
    done = bench("--max-size", "8KiB", "--bridge", "shm", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["ways"]) == ["native", "shm"]
    assert found["ways"]["shm"]["message_bytes_per_s"]["8192"] > 0
    assert all(way["exact"] == {"sums": 8, "messages": 8, "wrong": []} for way in found["ways"].values())
    assert found["ways"]["native"]["host_bytes_per_gb"] is None  # nobody counts them there
    assert "8 gloo groups" in found["raw_bytes_per_s"]
    assert "1 KiB p99" in done.stderr


def test_a_pipeline_leaves_ranks_idle_that_have_no_sample() -> None:
    argv = ["--emulate", "cpu:2,cpu:1", "--rounds", "1", "--seq-len", "16", "--micro-batches", "2", "--json"]
    command = [sys.executable, "-m", "hetctl", "bench", "pipeline", *argv]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_s"]["bridged"][0] > 0


def test_a_bridge_that_cannot_be_is_refused() -> None:
    done = bench("--bridge", "direct")
    assert done.returncode == 2
    assert "no bridge can be direct here" in done.stderr
    assert bench("--emulate", "h200:2").returncode == 2
