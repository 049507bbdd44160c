"""Replicas of uneven counts across islands: how far apart they are ready, and behind what their gradient sums hide.

PYTHONPATH=. python3 tests/gpu/replicas_check.py [--each 1] [--parts spread,trace,layers] [--ways shm,tcp]

`spread` trains a 1.1-billion-parameter Llama, one island held to 0.6 of its speed, its counts adapted to what was
measured. `trace` trains the first 24 blocks of Llama-2-7B and reads the traces of one step; then without overlap.
`layers` trains a pipeline of the former Llama whose plan was made lopsided, with and without `--adapt`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetctl.comm.contract.plan import load_plan, save_plan
from hetctl.trainer.adapt.resplit import with_layers
from tests.gpu.emulated import train

LLAMA_2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
REPLICAS = ("parallelism.pipeline=1", "parallelism.tensor=1", "parallelism.data=2", "checkpoint.last=false")


def seconds(found: dict[str, Any]) -> str:
    times = [record["step_time_s"] for record in found["records"][2:]]
    return f"{statistics.median(times):.3f} s ({min(times):.3f} - {max(times):.3f})"


def spread(options: argparse.Namespace, folder: Path) -> None:
    spec = f"h200:{options.each},mi325x:{options.each}@0.6"
    settings = (
        "model.name=llama-1b-untied",
        "data.source=python-stdlib",
        "model.seq_len=4096",
        f"batch.global_batch={64 * options.each}",
    )
    settings += ("train.steps=28", f"batch.micro_batch_size={options.each}", "train.validation_samples=8")
    found = train(folder / "run", spec, (*REPLICAS, *settings, "train.adapt=true"))
    apart = 100 * found["replica_spread"]
    print(
        f"spread | {spec}: replicas ready within {apart:.2f} % of a step, step {seconds(found)}, "
        f"counts {found['adapted'] or 'as planned'}, loss {found['first_loss']:.3f} -> {found['last_loss']:.3f}",
        flush=True,
    )


def trace(options: argparse.Namespace, folder: Path) -> None:
    spec = f"h200:{options.each},mi325x:{options.each}"
    (folder / "config.json").write_text(json.dumps(LLAMA_2))
    size = 8 * options.each
    settings = (
        f"model.name={folder / 'config.json'}",
        "data.source=python-stdlib",
        "model.seq_len=4096",
        f"batch.global_batch={4 * size}",
    )
    settings += (f"batch.micro_batch_size={size}", "train.steps=5", "train.validation_samples=8")
    for way in options.ways.split(","):
        for overlap in ("true", "false"):
            more = (f"bridge.transport={way}", f"train.overlap={overlap}", "train.profile_step=5")
            run = folder / f"{way}-{overlap}"
            found = train(run, spec, (*REPLICAS, *settings, *more))
            traces = [json.loads(f.read_text())["hetctl"] for f in sorted((run / "profile").glob("rank-*.json"))]
            shares = [t["sent_before_backward_ended"] for t in traces]
            sent = sum(t["sent_bytes"] for t in traces) / len(shares)
            steps = [r["step_time_s"] for r in found["records"][1:4]]  # the fifth was traced
            print(
                f"trace | {spec} {way}, overlap {overlap}: {[round(s, 3) for s in shares]} of {sent / 1e9:.1f} GB a "
                f"rank had left when backward ended; steps {[round(s, 3) for s in steps]} s, shares {found['shares']}",
                flush=True,
            )


def layers(options: argparse.Namespace, folder: Path) -> None:
    spec, plan = f"h200:{options.each},mi325x:{options.each}", folder / "plan.yaml"
    settings = (
        "model.name=llama-1b-untied",
        "data.source=python-stdlib",
        "model.seq_len=4096",
        "batch.global_batch=16",
        "batch.micro_batch_size=1",
    )
    settings += ("train.steps=30", "train.validation_samples=16", "checkpoint.every=10", "checkpoint.last=false")
    words = [word for key in (*settings, "parallelism.pipeline=2") for word in ("--set", key)]
    asked = [sys.executable, "-m", "hetctl", "plan", "--emulate", spec, "-o", str(plan), *words]
    subprocess.run(asked, check=True, capture_output=True)
    made = load_plan(plan)
    save_plan(plan, with_layers(made, [[made.layer_count - 3, 3]]))
    for adapt in ("false", "true"):
        found = train(folder / adapt, "", (*settings, f"train.adapt={adapt}"), plan=plan)
        steps = [r["step_time_s"] for r in found["records"] if "step_time_s" in r]
        spent = {f"steps {a + 3}-{a + 10}": f"{statistics.median(steps[a + 2 : a + 10]):.3f}" for a in (0, 10, 20)}
        moved = [(r["step"], r["before"], r["after"]) for r in found["recut"]]
        print(f"layers | {spec}, adapt {adapt}: {spent} s, {moved}, loss {found['last_loss']:.4f}", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {"spread": spread, "trace": trace, "layers": layers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=1, help="devices of an island")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ways", default="shm,tcp")
    options = parser.parse_args()
    failed = 0
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                PARTS[name](options, Path(folder))
            except Exception:
                traceback.print_exc()
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
