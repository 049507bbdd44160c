"""Fine-tuning on real GPUs: parity of adapters, a model of 8 B on 1+1 beside one device and TRL. Prints a table.

PYTHONPATH=. python3 tests/gpu/finetune_check.py [PATTERN]     one GPU does; two islands share it then

TRL's part wants trl, peft, accelerate, datasets and bitsandbytes, and says so where it lacks one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hetctl.comm.contract.plan import load_plan
from hetctl.trainer.model.adapters import Adapters
from hetctl.trainer.model.config import config_of
from hetctl.trainer.model.quantised import dequantise, quantise
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from tests.comm.spawn import on_islands
from tests.gpu.emulated import train
from tests.gpu.train_check import REPLICAS, ROWS, TWO, part
from tests.layouts import Layout
from tests.trainer.loop.test_parity import ALL_LINEAR
from tests.trainer.parity import SHAPE, difference, recipe, reference, train_layout

WIDE = replace(SHAPE, head_dim=64, intermediate=256)  # rows that fill blocks
MODEL, SEQ_LEN, BATCH = "llama-8b", 2048, 16
COMMON = (
    f"model.name={MODEL}",
    f"model.seq_len={SEQ_LEN}",
    f"batch.global_batch={BATCH}",
    "data.source=python-stdlib",
    "lora.rank=16",
    "train.steps=8",
    "train.validation_samples=1",
    "checkpoint.last=false",
)
RATES: dict[str, float] = {}
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def parity(layout: Layout, shape: ModelShape) -> str:
    asked = recipe("adamw", clip_norm=0.5, global_batch=8)
    sizes = tuple(len(island) for island in layout.islands)
    found = on_islands(sizes, train_layout, layout, asked, shape, "", "cuda", torch_backend="nccl", seconds=180)
    worst = difference(found, reference(asked, shape))
    assert worst < 1e-10, f"deviates by {worst:.1e}"
    return f"worst deviation {worst:.1e} over 20 steps"


def made_whole() -> str:
    """Seconds to make an MLP's matrix of its bytes, as a multiple of writing it."""
    words, matrix = [], torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16)
    for kind in ("int8", "nf4"):
        packed = quantise(matrix, kind)
        for name, body in (("eager", dequantise), ("compiled", torch.compile(dequantise, dynamic=False))):
            made = seconds_of(partial(body, packed, kind, 4096, torch.bfloat16))
            words.append(f"{kind} {name} {made * 1e6:.0f} us, {made / seconds_of(matrix.clone):.1f} copies")
    return "; ".join(words)


def seconds_of(body: Any) -> float:
    for _ in range(3):
        body()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(20):
        body()
    torch.cuda.synchronize()
    return (time.monotonic() - begin) / 20


def ours(name: str, spec: str, *settings: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = train(Path(folder), spec, (*COMMON, *settings))
        plan = load_plan(Path(folder) / "plan.yaml")
    assert plan.predicted is not None
    RATES[name] = median(m["tokens_per_s"] for m in found["records"][3:])
    held, predicted = found["memory_bytes"], plan.predicted.memory_bytes
    stages = [f"layers {s.layers} recompute {s.recompute}" for replica in plan.replicas for s in replica.stages]
    words = ", ".join(
        f"{h / 2**30:.2f} of {p / 2**30:.2f} GiB ({h / p:.3f})" for h, p in zip(held, predicted, strict=True)
    )
    seconds = BATCH * SEQ_LEN / RATES[name] / plan.predicted.step_time_s
    assert found["last_loss"] < found["first_loss"]
    print(found["shares"], flush=True)
    return f"{RATES[name]:.0f} tokens/s, {seconds:.2f} of the predicted time, memory {words}; {'; '.join(stages)}"


def theirs(name: str, *, quantize: str) -> str:
    """The better one of TRL with and without recomputation."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(config_of(SHAPES[MODEL], dtype="bfloat16")))
        for micro, more in ((1, []), (2, []), (4, []), (8, ["--recompute"])):
            argv = [sys.executable, "tests/gpu/stock_finetune.py", str(config), "--quantize", quantize]
            argv += ["--seq-len", str(SEQ_LEN), "--batch", str(BATCH), "--micro", str(micro), *more]
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | ONE_GPU)
            if done.returncode:
                print(f"TRL with {micro} samples {more}:", done.stderr.strip()[-300:], flush=True)
                continue
            one = json.loads(done.stdout.splitlines()[-1])
            found.append((one["tokens_per_s"], one["peak_bytes"], f"{micro} samples {' '.join(more)}"))
            print(found[-1], flush=True)
    rate, peak, how = max(found)
    return f"{rate:.0f} tokens/s ({how}), {peak / 2**30:.2f} GiB; ours over it {RATES.get(name, 0.0) / rate:.2f}"


def main() -> int:
    kind = "h200" if "H200" in torch.cuda.get_device_name(0) else "h100"
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    pair = f"{kind}:1~24GiB,mi300x:1~24GiB"
    part("parity adapters 1+1", lambda: parity(TWO, replace(SHAPE, adapters=Adapters(3, 6.0, ALL_LINEAR))))
    part("parity magnitudes 1+1", lambda: parity(TWO, replace(SHAPE, adapters=Adapters(3, 6.0, ALL_LINEAR, dora=True))))
    part(
        "parity dropout replicas",
        lambda: parity(REPLICAS, replace(SHAPE, adapters=Adapters(3, 6.0, ALL_LINEAR, dropout=0.2))),
    )
    part("parity nf4 1+1", lambda: parity(TWO, replace(WIDE, adapters=Adapters(3, 6.0, ALL_LINEAR, quantised="nf4"))))
    part(
        "parity int8 replicas",
        lambda: parity(REPLICAS, replace(WIDE, adapters=Adapters(3, 6.0, ALL_LINEAR, quantised="int8"))),
    )
    part("made whole", made_whole)
    for quantize in ("none", "nf4"):
        asked = f"lora.quantize={quantize}"
        part(f"{quantize} one device", partial(ours, quantize, f"{kind}:1", asked))
        part(
            f"{quantize} one device, compiled",
            partial(ours, f"{quantize} compiled", f"{kind}:1", asked, "train.compile=true"),
        )
        part(f"{quantize} TRL", partial(theirs, quantize, quantize=quantize))
        part(f"{quantize} 1+1 of 24 GiB", partial(ours, f"{quantize} pair", pair, asked))
        full, compiled = "parallelism.recompute=full", "train.compile=true"
        part(f"{quantize} 1+1 of 24 GiB, full", partial(ours, f"{quantize} pair", pair, asked, full))
        part(f"{quantize} 1+1 of 24 GiB, compiled", partial(ours, f"{quantize} pair", pair, asked, compiled))
    part("dora 1+1 of 24 GiB", partial(ours, "dora pair", pair, "lora.dora=true"))
    width = max(len(name) for name, *_ in ROWS)
    for name, verdict, words in ROWS:
        print(f"{name:<{width}}  {verdict:<6}  {words}")
    return any(verdict == "FAILED" for _, verdict, _ in ROWS)


if __name__ == "__main__":
    sys.exit(main())
