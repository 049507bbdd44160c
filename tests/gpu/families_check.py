"""Attention with windows and caps on a GPU: flex attention beside the definition, and how long it takes beside plain.

PYTHONPATH=. python3 tests/gpu/families_check.py

Two minutes; prints errors (fp32, against the definition in fp64), times (bf16, of plain attention's), losses of small
models of each family over a few steps, and one JSON document.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hetctl.trainer.model import attention
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES

CASES = {"window": (512, 0.0), "cap": (0, 50.0), "window and cap": (512, 50.0)}


def tensors(seq: int, dtype: torch.dtype, head_dim: int = 128) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, seq, head_dim, device="cuda", dtype=dtype, requires_grad=True) for heads in (16, 4, 4)
    ]


def error(seq: int, window: int, cap: float) -> float:
    """The largest relative deviation of outputs and gradients from the definition in fp64."""
    found, wanted = (
        tensors(seq, torch.float32),
        [x.detach().double().requires_grad_() for x in tensors(seq, torch.float32)],
    )
    y = attention.causal_attention(*found, window=window, cap=cap)
    z = attention._by_mask(*wanted, scale=None, window=window, cap=cap)
    seed = torch.randn_like(z)
    y.backward(seed.float())
    z.backward(seed)
    pairs = [(y, z), *((a.grad, b.grad) for a, b in zip(found, wanted, strict=True))]
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def seconds(seq: int, window: int, cap: float, head_dim: int) -> float:
    q, k, v = tensors(seq, torch.bfloat16, head_dim)
    seed, times = None, []
    for _ in range(13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        y = attention.causal_attention(q, k, v, window=window, cap=cap)
        seed = torch.ones_like(y) if seed is None else seed
        y.backward(seed)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def losses(name: str, **change: object) -> list[float]:
    """Of a few steps on one batch in bf16, which a model that computes its gradients rightly learns."""
    shape = replace(SHAPES[name], layers=4, vocab=512, hidden=512, intermediate=1024, **change)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = StageModel(shape, (0, 4)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 512, (2, 1025), device="cuda")
    found = []
    for _ in range(30):
        scaled, total = model.loss(tokens[:, :-1], tokens[:, 1:], scale=1.0 / 2048)
        optimizer.zero_grad()
        scaled.backward()
        optimizer.step()
        found.append(float(total) / 2048)
    return found


def main() -> int:
    rows: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, (window, cap) in CASES.items():
        rows[f"error, {name}"] = worst = error(2048, window, cap)
        print(f"{name:16} error {worst:.1e}")
    for seq in (4096, 16384):
        for head_dim in (128, 256):
            plain = seconds(seq, 0, 0.0, head_dim)
            for name, (window, cap) in CASES.items():
                took = seconds(seq, window and 1024, cap, head_dim)
                rows[f"time of plain, {name}, {seq} tokens, heads of {head_dim}"] = took / plain
                print(f"{seq:6} tokens, heads of {head_dim}, {name:16} {took / plain:5.2f} of {plain * 1e3:.2f} ms")
    heads = {"heads": 8, "kv_heads": 4, "head_dim": 64}
    for name, change in {
        "gemma2-9b": {"windows": (256, 0, 256, 0), "embedding_scale": 512**0.5},
        "gemma3-4b": {"windows": (256, 256, 256, 0), "embedding_scale": 512**0.5},
        "qwen3-8b": {"tied_embeddings": True},
        "olmo2-7b": {"kv_heads": 8},
        "granite3-8b": {},
        "phi4": {},
        "smollm3-3b": {"unrotated": (3,)},
    }.items():
        found = losses(name, **{**heads, **change})
        rows[f"losses, {name}"] = [found[0], found[-1]]
        print(f"{name:12} loss {found[0]:.3f} -> {found[-1]:.3f}")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
