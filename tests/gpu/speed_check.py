"""On two GPUs of one host: tokens/s of Llama-8B sharded in one island, and of a pipeline native beside bridged.

PYTHONPATH=. python3 tests/gpu/speed_check.py [--only sharded|pipeline] [--steps 10] [--seconds 540]

Prints a row as soon as each run ends, then one JSON document. Random weights, bytes as tokens, vocabulary 128,256.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import yaml

from tests.gpu import emulated

MODEL, SEQ_LEN = "llama-8b", 4096
COMMON = (
    f"model.name={MODEL}",
    "data.source=python-stdlib",
    f"model.seq_len={SEQ_LEN}",
    "train.validation_samples=1",
    "optimizer.lr=1.0e-5",
    "checkpoint.last=false",
    "parallelism.tensor=1",
    "parallelism.data=1",
)
SHARDED = ("parallelism.pipeline=1", "batch.global_batch=16", "batch.micro_batch_size=2")
STAGES = ("parallelism.pipeline=2", "batch.global_batch=16", "batch.micro_batch_size=1")
WARM = 3  # steps that are not counted
ROWS: list[dict[str, Any]] = []


class Clock:
    """What is left of the time that all runs together may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def train(spec: str, settings: tuple[str, ...], *, steps: int, seconds: float) -> dict[str, Any]:
    """One `hetctl train`: its summary, its steps' figures, and its plan."""
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with tempfile.TemporaryDirectory() as folder:
        whole = (*COMMON, *settings, f"train.steps={steps}")
        found = emulated.train(Path(folder), spec, whole, seconds=seconds, env=environment)
        logs = [path.read_text()[-1500:] for path in sorted((Path(folder) / "logs").glob("rank-*.log"))]
        found["plan"] = yaml.safe_load((Path(folder) / "plan.yaml").read_text())
        found["said"] = [line for log in logs for line in log.splitlines() if "torch.compile" in line]
        return found


def row(name: str, spec: str, *settings: str, steps: int, clock: Clock) -> dict[str, Any]:
    """One run as a row of the table; an error is a row too."""
    about: dict[str, Any] = {"name": name, "spec": spec, "settings": settings}
    began = time.monotonic()
    try:
        if clock.left() < 40:
            raise TimeoutError("no time is left for it")
        found = train(spec, settings, steps=steps, seconds=clock.left())
        later = found["records"][WARM:]
        stages = found["plan"]["replicas"][0]["stages"]
        about |= {
            "tokens_per_s_per_gpu": statistics.median(f["tokens_per_s"] for f in later) / 2,
            "step_time_s": statistics.median(f["step_time_s"] for f in later),
            "step_times_s": [round(f["step_time_s"], 3) for f in found["records"]],
            "losses": [round(f["loss"], 4) for f in found["records"]],
            "memory_gib": [round(m / 2**30, 1) for m in found["memory_bytes"]],
            "predicted_gib": [round(m / 2**30, 1) for m in found["plan"]["predicted"]["memory_bytes"]],
            "layers": [s["layers"][1] - s["layers"][0] for s in stages],
            "shards": [s["shards"] for s in stages],
            "recompute": [s["recompute"] for s in stages],
            "forwards_ahead": found["plan"]["forwards_ahead"],
            "shares": found["shares"],
            "said": found["said"],
        }
    except Exception as error:
        traceback.print_exc()
        about["error"] = f"{type(error).__name__}: {error}"[:1500]
    about["wall_s"] = round(time.monotonic() - began, 1)
    ROWS.append(about)
    print(words(about), flush=True)
    return about


def words(about: dict[str, Any]) -> str:
    if "error" in about:
        return f"{about['name']:24} FAILED after {about['wall_s']} s: {about['error'].splitlines()[0][:150]}"
    shares = " ".join(f"{k} {v:.3f}" for k, v in about["shares"].items())
    return (
        f"{about['name']:24} {about['tokens_per_s_per_gpu']:8.0f} tokens/s/GPU  step {about['step_time_s']:.3f} s  "
        f"memory {about['memory_gib']} GiB  layers {about['layers']} shards {about['shards']}  {shares}"
    )


def sharded(steps: int, clock: Clock) -> None:
    for name, more in (("sharded eager", ()), ("sharded compiled", ("train.compile=true",))):
        row(name, "h200:2", *SHARDED, *more, steps=steps, clock=clock)


def pipeline(steps: int, clock: Clock) -> None:
    """Native with the planner's split, then bridged with the same one."""
    native = row("pipeline native", "h200:2", *STAGES, steps=steps, clock=clock)
    split = (f"parallelism.layers={native['layers']}",) if "layers" in native else ()
    for transport in ("shm", "tcp"):
        name, setting = f"pipeline bridged {transport}", f"bridge.transport={transport}"
        found = row(name, "h200:1,mi325x:1", *STAGES, *split, setting, steps=steps, clock=clock)
        if "error" not in found and "error" not in native:
            ratio = found["tokens_per_s_per_gpu"] / native["tokens_per_s_per_gpu"]
            print(f"{name} / native: {ratio:.3f}", flush=True)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", choices=("sharded", "pipeline"))
    asked.add_argument("--steps", type=int, default=10)
    asked.add_argument("--seconds", type=float, default=540)
    given = asked.parse_args()
    clock = Clock(given.seconds)
    if given.only in (None, "sharded"):
        sharded(given.steps, clock)
    if given.only in (None, "pipeline"):
        pipeline(given.steps, clock)
    print("\n" + "\n".join(words(about) for about in ROWS))
    print(json.dumps(ROWS))
    return int(any("error" in about for about in ROWS))


if __name__ == "__main__":
    sys.exit(main())
