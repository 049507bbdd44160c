"""torchtitan (PyPI, unmodified) on two GPUs: under `hetctl run --as-nccl` across islands, and as a peer in speed.

PYTHONPATH=. python3 tests/gpu/torchtitan_check.py as-nccl          losses over NCCL beside losses over het, 1+1
PYTHONPATH=. python3 tests/gpu/torchtitan_check.py speed [--rounds 2] [--eager]
    Llama-3-8B sharded over both GPUs, sequence 4096, 8 micro-batches of one sample a GPU, bf16: in turn with hetctl

Needs torchtitan 0.2.2 and what it imports; its text and tokenizer are made here from Python's own sources.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = """
[job]
dump_folder = "{folder}/out"
[debug]
seed = 1
[model]
name = "llama3"
flavor = "{flavor}"
hf_assets_path = "{folder}/tok"
[optimizer]
name = "AdamW"
lr = 1e-5
[training]
local_batch_size = {local}
global_batch_size = {batch}
seq_len = {seq_len}
steps = {steps}
dataset = "c4_test"
[parallelism]
data_parallel_shard_degree = {shards}
pipeline_parallel_degree = {stages}
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 1
[activation_checkpoint]
mode = "none"
[compile]
enable = {compile}
[metrics]
log_freq = 1
"""
SEQ_LEN, SAMPLES = 4096, 16


def prepare(folder: Path) -> None:
    """A byte-level tokenizer and a text where torchtitan's test dataset looks for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))[:120]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        sources, trainers.BpeTrainer(vocab_size=2000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(about))
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    lines = (json.dumps({"text": Path(p).read_text(errors="replace")}) for p in sources)
    (data / "data.json").write_text("\n".join(lines) + "\n")


def titan(folder: Path, argv: list[str], *, seconds: float, **job: object) -> str:
    """One torchtitan job under a launcher's words; its whole log. Raises RuntimeError."""
    (folder / "job.toml").write_text(JOB.format(folder=folder, **job))
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = os.environ | offline | {"PYTHONPATH": path}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(log[-3000:])
    return log


def figures(log: str, name: str) -> list[float]:
    """A column of torchtitan's step lines, one value a step (every rank's line says the same loss)."""
    found: dict[int, float] = {}
    for step, rest in re.findall(r"step: +(\d+) +(.*)", log):
        if match := re.search(rf"{name}: +([\d.,]+)", rest):
            found[int(step)] = float(match[1].replace(",", ""))
    return [found[step] for step in sorted(found)]


def launched(ranks: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", ranks),
        *("-m", "torchtitan.train", "--job.config_file", "job.toml"),
    ]


def as_nccl(folder: Path) -> int:
    """Losses of FSDP2 and of a pipeline over NCCL, and over het between two islands of one GPU."""
    worst = 0.0
    het = [sys.executable, "-m", "hetctl", "run", "--emulate", "h200:1,mi325x:1", "--as-nccl", "--"]
    het += ["python", "-m", "torchtitan.train", "--job.config_file", "job.toml"]
    for name, shards, stages in (("FSDP2", 2, 1), ("pipeline", 1, 2)):
        job = {"flavor": "debugmodel", "shards": shards, "stages": stages, "seq_len": 512, "steps": 10}
        job |= {"local": 8, "batch": 8 * shards, "compile": "false"}
        native = figures(titan(folder, launched("0,1"), seconds=120, **job), "loss")
        bridged = figures(titan(folder, het, seconds=120, **job), "loss")
        far = max(abs(a - b) / a for a, b in zip(native, bridged, strict=True))
        print(f"{name}: NCCL {native[0]:.5f} .. {native[-1]:.5f}, het {bridged[-1]:.5f}: {far:.1e} apart", flush=True)
        worst = max(worst, far)
    return int(not worst < 2e-3)  # bf16 sums in another order


def ours(folder: Path, *, compiled: bool, steps: int) -> list[float]:
    """tokens/s a GPU of each step of `hetctl train` of the same work."""
    run = folder / f"run-{len(list(folder.glob('run-*')))}"
    settings = {
        "model.name": "llama-8b",
        "model.seq_len": SEQ_LEN,
        "batch.global_batch": SAMPLES,
        "batch.micro_batch_size": 2,
        "parallelism.pipeline": 1,
        "train.steps": steps,
        "train.compile": str(compiled).lower(),
        "train.validation_samples": 1,
        "checkpoint.last": "false",
        "optimizer.lr": "1.0e-5",
    }
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", "h200:2", "--run-dir", str(run)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return [json.loads(line)["tokens_per_s"] / 2 for line in (run / "metrics.jsonl").read_text().splitlines()]


def speed(folder: Path, *, rounds: int, compiled: bool, steps: int, first: str) -> int:
    job = {"flavor": "8B", "shards": 2, "stages": 1, "seq_len": SEQ_LEN, "steps": steps, "local": 1, "batch": SAMPLES}
    order = ("hetctl", "torchtitan") if first == "hetctl" else ("torchtitan", "hetctl")
    found: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            if name == "hetctl":
                rates = ours(folder, compiled=compiled, steps=steps)
            else:
                log = titan(folder, launched("1"), seconds=280, compile=str(compiled).lower(), **job)
                rates = figures(log, "tps")
            found[name].append(statistics.median(rates[4:]))
            print(f"{name}: {found[name][-1]:.0f} tokens/s a GPU, steps {[round(r) for r in rates]}", flush=True)
    ratio = statistics.median(found["hetctl"]) / statistics.median(found["torchtitan"])
    print(f"hetctl / torchtitan {'compiled' if compiled else 'eager'}: {ratio:.3f}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("as-nccl", "speed"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--first", choices=("hetctl", "torchtitan"), default="torchtitan")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if options.what == "as-nccl":
            return as_nccl(folder)
        return speed(
            folder, rounds=options.rounds, compiled=not options.eager, steps=options.steps, first=options.first
        )


if __name__ == "__main__":
    sys.exit(main())
