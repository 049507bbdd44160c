"""On real GPUs: fp64 parity across emulated islands, the demo, and a pipeline bridged beside native. Prints a table.

PYTHONPATH=. python3 tests/gpu/train_check.py [PATTERN]        parts that match; two or four GPUs of one host

Two islands of two share two GPUs where there are no four.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.comm.spawn import on_islands
from tests.gpu.emulated import train
from tests.layouts import Cut, Layout, Pipe
from tests.trainer.parity import SHAPE, difference, recipe, reference, train_layout

TWO = Layout(((0,), (1,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1,))), 2, 4),))
FOUR = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 2), (0, 1)), Cut((2, 4), (2, 3))), 4, 2),))
UNEQUAL = Layout(((0,), (1, 2, 3)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1, 2, 3))), 4, 2),))
TENSOR = Layout(((0, 1),), (Pipe((Cut((0, 4), (0, 1), tensor=2),), 2, 4),))
INTERLEAVED = Layout(
    ((0,), (1,)), (Pipe(tuple(Cut((i, i + 1), (i % 2,)) for i in range(4)), 2, 4),), schedule="interleaved"
)
NATIVELY_INTERLEAVED = Layout(((0, 1),), INTERLEAVED.pipes, schedule="interleaved")
ZERO_BUBBLE = Layout(((0,), (1,)), TWO.pipes, schedule="zero-bubble")
HOST_ACTIVATIONS = Layout(
    ((0,), (1,)),
    (Pipe((Cut((0, 2), (0,), host_activations=True), Cut((2, 4), (1,), host_activations=True)), 2, 4),),
)
REPLICAS = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 5), Pipe((Cut((0, 4), (1,)),), 1, 3)))
WIDE_REPLICAS = Layout(
    ((0, 1), (2, 3)), (Pipe((Cut((0, 4), (0, 1)),), 2, 2), Pipe((Cut((0, 2), (2,)), Cut((2, 4), (3,))), 1, 4))
)
TENSOR_STAGES = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 2), (0, 1), tensor=2), Cut((2, 4), (2, 3), tensor=2)), 2, 4),))
ROWS: list[tuple[str, str, str]] = []
ONLY = sys.argv[1] if len(sys.argv) > 1 else ""


def part(name: str, body: Callable[[], str]) -> None:
    """One part of the check: its outcome is a row, and an error does not stop the others."""
    if not re.search(ONLY, name):
        return
    begin = time.monotonic()
    try:
        words, verdict = body(), "ok"
    except Exception as error:
        traceback.print_exc()
        words, verdict = f"{type(error).__name__}: {error}"[:300], "FAILED"
    ROWS.append((name, verdict, f"{words}  ({time.monotonic() - begin:.0f} s)"))
    print(*ROWS[-1], sep=" | ", flush=True)


def parity(layout: Layout, plant: str = "", **train: Any) -> str:
    sizes = tuple(len(island) for island in layout.islands)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, **train)
    found = on_islands(sizes, train_layout, layout, asked, SHAPE, plant, "cuda", torch_backend="nccl", seconds=180)
    worst = difference(found, reference(asked))
    assert worst < 1e-10, f"deviates by {worst:.1e}"
    return f"worst deviation {worst:.1e} over 20 steps"


def run(spec: str, *settings: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), spec, settings)


LLAMA = (
    "model.name=llama-1b-untied",
    "data.source=python-stdlib",
    "model.seq_len=4096",
    "batch.global_batch=16",
    "batch.micro_batch_size=1",
)


def demo(spec: str) -> str:
    found = run(spec)
    assert found["last_loss"] < 0.8 * found["first_loss"]
    return f"loss {found['first_loss']:.3f} -> {found['last_loss']:.3f}, wall {found['wall_s']:.0f} s"


def pipeline() -> str:
    """A 1.2-billion-parameter Llama in two stages: native and bridged, median of the later steps' tokens/s."""
    common = (*LLAMA, "train.steps=8", "train.validation_samples=16", "parallelism.pipeline=2", "checkpoint.last=false")
    rates = {}
    for name, spec in (("native", "h200:2"), ("bridged", "h200:1,mi325x:1")):
        found = run(spec, *common)
        later = sorted(m["tokens_per_s"] for m in found["records"][3:])
        rates[name] = later[len(later) // 2]
        print(name, {k: found[k] for k in ("first_loss", "last_loss", "shares", "bridge_bytes")}, flush=True)
    ratio = rates["bridged"] / rates["native"]
    return f"native {rates['native']:.0f}, bridged {rates['bridged']:.0f} tokens/s: {ratio:.3f}"


def rate_of(spec: str, *more: str) -> float:
    """Tokens per second of the later steps of a 1.2-billion-parameter Llama."""
    common = (*LLAMA, "train.steps=10", "train.validation_samples=16", "checkpoint.last=false")
    later = sorted(m["tokens_per_s"] for m in run(spec, *common, *more)["records"][4:])
    return float(later[len(later) // 2])


def schedules() -> str:
    """What the planner never chooses by itself, beside what it would: tokens/s over 1F1B's."""
    base = rate_of("h200:1,mi325x:1", "parallelism.pipeline=2", "parallelism.schedule=1f1b")
    words = [f"1f1b {base:.0f} tokens/s"]
    for name in ("eager-1f1b", "zero-bubble", "interleaved"):
        other = rate_of("h200:1,mi325x:1", "parallelism.pipeline=2", f"parallelism.schedule={name}")
        words.append(f"{name} {other / base:.3f}")
    held = rate_of("h200:1,mi325x:1", "parallelism.pipeline=2", "parallelism.activations=host")
    return ", ".join([*words, f"activations on the host {held / base:.3f}"])


def tensor() -> str:
    """One island of two GPUs: a tensor group beside the plan's own choice."""
    own, shared = rate_of("h200:2"), rate_of("h200:2", "parallelism.tensor=2")
    return f"own choice {own:.0f}, tensor 2 {shared:.0f} tokens/s: {shared / own:.3f}"


def main() -> int:
    count = torch.cuda.device_count()
    print(f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    part("parity 1+1", lambda: parity(TWO))
    part("parity tensor 2", lambda: parity(TENSOR))
    part("parity tensor 2, compiled", lambda: parity(TENSOR, compile=True))
    part("parity replicas", lambda: parity(REPLICAS))
    part("parity replicas, state over all", lambda: parity(REPLICAS, "small buckets", sharded="replicas"))
    part("parity zero bubble", lambda: parity(ZERO_BUBBLE))
    part("parity interleaved", lambda: parity(INTERLEAVED))
    part("parity interleaved, native", lambda: parity(NATIVELY_INTERLEAVED))
    part("parity activations on the host", lambda: parity(HOST_ACTIVATIONS, "everything leaves"))
    part(
        "parity activations on the host, compiled", lambda: parity(HOST_ACTIVATIONS, "everything leaves", compile=True)
    )
    if count >= 2:
        part("parity 2+2", lambda: parity(FOUR))
        part("parity replicas 2+2", lambda: parity(WIDE_REPLICAS))
        part("parity replicas 2+2, state over all", lambda: parity(WIDE_REPLICAS, "small buckets", sharded="replicas"))
        part("parity tensor 2+2", lambda: parity(TENSOR_STAGES))
        part("demo 2+2", lambda: demo("h200:2,mi325x:2"))
    if count >= 3:
        part("parity 1+3", lambda: parity(UNEQUAL))
    part("demo 1+1", lambda: demo("h200:1,mi325x:1"))
    part("pipeline", pipeline)
    part("schedules", schedules)
    part("tensor 2 beside 2 shards", tensor)
    print("\n" + "\n".join(" | ".join(row) for row in ROWS))
    return int(any(verdict != "ok" for _, verdict, _ in ROWS))


if __name__ == "__main__":
    sys.exit(main())
