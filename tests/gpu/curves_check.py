"""Fine-tuning from a Hugging Face folder of the real shapes: bridged loss curves within the spread of native ones.

PYTHONPATH=. python3 tests/gpu/curves_check.py [--models llama-8b,qwen2-7b] [--steps 500] [--seq-len 128]
    [--natives 2 4 8] [--bridged 4] [--ways shm] [--known FILE]

Two GPUs, one an island, a pipeline of two stages. The weights are random, in a folder as Hugging Face writes them
(sharded safetensors, config.json, tokenizer.json trained here); the text is Python's standard library. Native runs
differ in nothing but how many micro-batches their sums have, that is in the order in which gradients are added.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.model.huggingface import write_model
from hetctl.trainer.model.initial_weights import initial
from hetctl.trainer.model.model import shapes_of
from tests.gpu.torchtitan_check import prepare
from tests.rigs.cluster import losses

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
WINDOW = 20  # steps averaged: single steps differ by their text


def write_folder(folder: Path, name: str, device: str) -> None:
    """The model's config.json, random weights in bf16 and a tokenizer."""
    shape = find_shape(name)
    sizes = shapes_of(shape)

    def made(tensor: str) -> torch.Tensor:
        found = initial(tensor, sizes[tensor], shape, seed=1, dtype=torch.bfloat16, device=torch.device(device))
        return found.cpu()

    write_model(folder, config_of(shape, dtype="bfloat16"), sizes, made, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as made_here:
        prepare(Path(made_here))
        (folder / "tokenizer.json").write_bytes((Path(made_here) / "tok" / "tokenizer.json").read_bytes())


def train(model: Path, run: Path, spec: str, micro: int, options: argparse.Namespace, *more: str) -> list[float]:
    """The losses of one run. Raises RuntimeError with the end of its log."""
    settings = {
        "model.name": model,
        "model.seq_len": options.seq_len,
        "data.tokenizer": model / "tokenizer.json",
        "batch.global_batch": BATCH,
        "batch.micro_batch_size": micro,
        "parallelism.pipeline": 2,
        "parallelism.data": 1,
        "parallelism.tensor": 1,
        "train.steps": options.steps,
        "train.validation_samples": 8,
        "optimizer.lr": 1e-4,
        "optimizer.warmup_steps": 20,
        "checkpoint.last": "false",
    }
    words = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", spec, "--run-dir", str(run), *words, *more]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(argv, cwd=run.parent, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return losses(run)


def windows(values: list[float]) -> list[float]:
    return [statistics.fmean(values[k : k + WINDOW]) for k in range(0, len(values) - WINDOW + 1, WINDOW)]


def known(log: Path | None, name: str, run: str, steps: int) -> list[float] | None:
    """A curve that an earlier call, cut short, has printed."""
    for line in log.read_text().splitlines() if log else ():
        if line.startswith("{") and (found := json.loads(line))["model"] == name and found["run"] == run:
            curve: list[float] = found["losses"]
            if len(curve) != steps // WINDOW:
                raise SystemExit(f"{log}: the curve of {name}, {run}, is not of {steps} steps")
            return curve
    return None


def compare(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Three native curves, the bridged ones beside them; whether these stay as near as natives are to each other."""
    curves: dict[str, list[float]] = {}
    one, two = options.spec.split("/")
    wanted: list[tuple[str, str, int, tuple[str, ...]]] = [
        (f"native, micro-batches of {m}", one, m, ()) for m in options.natives
    ]
    micro = options.bridged
    wanted += [
        (f"{way}, micro-batches of {micro}", two, micro, ("--bridge", way)) for way in options.ways.split(",") if way
    ]
    for what, spec, micro, more in wanted:
        if (found := known(options.known, name, what, options.steps)) is not None:
            curves[what] = found
            continue
        if not (folder / name).exists():
            began = time.monotonic()
            write_folder(folder / name, name, options.device)
            print(f"{name}: folder written in {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        run = folder / f"{name}-{what.replace(' ', '-').replace(',', '')}"
        curves[what] = windows(train(folder / name, run, spec, micro, options, *more))
        seconds = round(time.monotonic() - began)
        print(json.dumps({"model": name, "run": what, "seconds": seconds, "losses": curves[what]}), flush=True)
    natives = [v for k, v in curves.items() if k.startswith("native")]
    widths = [max(at) - min(at) for at in zip(*natives, strict=True)]
    good = True
    for what, values in curves.items():
        if what.startswith("native"):
            continue
        far = [abs(b - statistics.fmean(at)) for b, at in zip(values, zip(*natives, strict=True), strict=True)]
        within = all(f <= w for f, w in zip(far, widths, strict=True))
        good &= within
        print(
            f"{name} | {what} | loss {values[0]:.4f} -> {values[-1]:.4f} | from the natives' mean at most "
            f"{max(far):.4f}, median {statistics.median(far):.4f} | natives apart at most {max(widths):.4f}, median "
            f"{statistics.median(widths):.4f} | {'within, everywhere' if within else 'OUTSIDE'}",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b,qwen2-7b")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--natives", type=int, nargs="+", default=[2, 4, 8], help="micro-batch sizes of native runs")
    parser.add_argument("--bridged", type=int, default=4, help="micro-batch size of bridged runs")
    parser.add_argument("--ways", default="shm", help="bridges, with commas; may be none")
    parser.add_argument("--spec", default="h200:2/h200:1,mi325x:1", help="one island / two of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--known", type=Path, help="what an earlier call printed: its runs are not repeated")
    options = parser.parse_args()
    good = True
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="curves-") as folder:
            good &= compare(name, Path(folder), options)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
