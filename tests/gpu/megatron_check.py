"""Megatron-core, unmodified, on two GPUs: its losses over NCCL beside those over het, 1+1, as stages and as replicas.

PYTHONPATH=. python3 tests/gpu/megatron_check.py     needs megatron-core (tried: 0.16.1) and two GPUs
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "programs" / "megatron_gpt.py")
NATIVE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
HET = [sys.executable, "-m", "hetctl", "run", "--emulate", "h200:1,mi325x:1", "--as-nccl", "--", "python3", PROGRAM]


def losses(argv: list[str]) -> tuple[str, list[float]]:
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False, timeout=240)
    found = [line for line in done.stdout.splitlines() if '"losses"' in line]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(argv)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    said = json.loads(found[0][found[0].index("{") :])
    return said["backend"], said["losses"]


def main() -> int:
    failed = 0
    for word in ("pipeline", "data"):
        with tempfile.TemporaryDirectory() as folder:
            _, native = losses([*NATIVE, folder, word])
            _, again = losses([*NATIVE, folder, word])
            backend, found = losses([*HET, folder, word])
        own = max(abs(a - b) for a, b in zip(native, again, strict=True))
        off = max(abs(a - b) for a, b in zip(native, found, strict=True))
        failed += backend != "het" or off > max(own, 1e-5)
        print(f"{word}: {backend} off by {off:.1e}, NCCL's two runs by {own:.1e}; {native[0]:.4f} -> {native[-1]:.4f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
