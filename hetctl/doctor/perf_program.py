"""The program that travels to hosts to compute: liveness of each GPU, speed, and the numerics gate. Needs torch there.

Fed on stdin, prints JSON lines, is never imported on a host. The numerics gate runs each operation forward and
backward on the device and compares with the same in fp64 on the CPU, in units of the dtype's epsilon.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ALIVE = """
import sys, torch
index, kind = int(sys.argv[1]), sys.argv[2]
torch.accelerator.set_device_index(index)
held = torch.empty(256 << 20, dtype=torch.uint8, device=kind).fill_(1)
a = torch.randn(2048, 2048, device=kind).bfloat16()
print(bool(torch.isfinite(a @ a).all().item()))
"""
ALIVE_S = 15.0
SEED = 20240607
SAMPLE = 128  # values of each result that are sent back, so that devices can be compared with each other
OPERATIONS = ("matmul", "attention", "rmsnorm", "swiglu", "softmax", "cross_entropy")
DTYPES = ("bfloat16", "float32")


def main(request: str) -> None:
    """Do what the request (JSON) asks for, say the result, leave at the deadline."""
    asked = json.loads(request)
    watchdog = threading.Timer(asked["deadline_s"], os._exit, [3])
    watchdog.daemon = True
    watchdog.start()
    os.environ.update(asked.get("environment", {}))
    try:
        import torch
    except Exception as error:
        say({"problem": f"torch cannot be imported: {type(error).__name__}: {error}"})
        return
    kind, count = devices(torch)
    found: list[dict[str, Any]] = [{"index": i} for i in range(count)]
    if kind != "cpu":
        alive(kind, found)
    document: dict[str, Any] = {"torch": torch.__version__, "kind": kind, "devices": found}
    if asked["program"] == "perf":
        for device in found:
            if not device.get("problem"):
                measure(torch, kind, device)
        document["allreduce_bytes_per_s"] = allreduce(torch, kind, count)
    say(document)


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def devices(torch: Any) -> tuple[str, int]:
    """The accelerator that torch sees and how many of it; the CPU counts as one."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    return "cpu", 1


def alive(kind: str, found: list[dict[str, Any]]) -> None:
    """Every device in a process of its own, all at once: one that hangs costs its deadline only."""
    began = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-I", "-c", ALIVE, str(device["index"]), kind],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for device in found
    ]
    for device, child in zip(found, children):  # noqa: B905 - Python 3.8 knows no strict
        try:
            output, errors = child.communicate(timeout=max(0.1, ALIVE_S - (time.monotonic() - began)))
            device["alive_s"] = round(time.monotonic() - began, 2)
            if child.returncode:
                lines = errors.strip().splitlines()
                device["problem"] = lines[-1][:300] if lines else f"exit code {child.returncode}"
            device["finite"] = output.strip() == "True"
        except subprocess.TimeoutExpired:
            child.kill()
            device["problem"] = f"it did not answer within {ALIVE_S:.0f} s"


def measure(torch: Any, kind: str, device: dict[str, Any]) -> None:
    """Speed and numerics of one device; what fails is said and leaves the rest."""
    where = torch.device(kind, device["index"]) if kind != "cpu" else torch.device("cpu")
    try:
        if kind != "cpu":
            torch.accelerator.set_device_index(device["index"])
        device["gemm_flops"] = gemm(torch, where)
        device["memory_bytes_per_s"] = copy(torch, where)
        device["numerics"] = numerics(torch, where)
    except Exception as error:
        device["problem"] = f"{type(error).__name__}: {error}"[:300]


def gemm(torch: Any, where: Any) -> float:
    """Floating point operations per second of a large bf16 product (a small fp32 one on a CPU)."""
    n, dtype = (8192, torch.bfloat16) if where.type != "cpu" else (512, torch.float32)
    a = torch.randn(n, n, device=where).to(dtype)
    return 2.0 * n**3 / timed(torch, where, lambda: a @ a)


def copy(torch: Any, where: Any) -> float:
    """Bytes read and written per second by a copy within the device."""
    count = (512 if where.type != "cpu" else 64) << 20
    a = torch.empty(count, dtype=torch.uint8, device=where).fill_(1)
    b = torch.empty_like(a)
    return 2.0 * count / timed(torch, where, lambda: b.copy_(a))


def allreduce(torch: Any, kind: str, count: int) -> float | None:
    """Bus bandwidth of a native all-reduce of 64 MiB over this host's devices, from one process; None without one."""
    if kind != "cuda" or count < 2:
        return None
    try:
        from torch.cuda import nccl

        tensors = [torch.ones(16 << 20, device=f"cuda:{i}") for i in range(count)]
        nccl.all_reduce(tensors)
        for i in range(count):
            torch.cuda.synchronize(i)
        began, rounds = time.perf_counter(), 10
        for _ in range(rounds):
            nccl.all_reduce(tensors)
        for i in range(count):
            torch.cuda.synchronize(i)
        seconds = (time.perf_counter() - began) / rounds
        return (64 << 20) / seconds * 2 * (count - 1) / count
    except Exception:
        return None


def timed(torch: Any, where: Any, work: Callable[[], Any]) -> float:
    """Seconds of one call, the best of three rounds after a warm-up."""

    def wait() -> None:
        if where.type != "cpu":
            torch.accelerator.synchronize()

    work()
    wait()
    best, calls = float("inf"), 5 if where.type != "cpu" else 2
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


# --- the numerics gate ---------------------------------------------------------------------------------------------


def operation(torch: Any, name: str) -> Callable[..., Any]:
    """One operation of a transformer layer on its inputs, in whatever dtype and place they are."""
    functional = torch.nn.functional
    table: dict[str, Callable[..., Any]] = {
        "matmul": lambda a, b: a @ b,
        "attention": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "rmsnorm": lambda x, w: functional.rms_norm(x, (x.shape[-1],), w, 1e-5),
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "softmax": lambda x: torch.softmax(x, dim=-1),
        "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1]),
    }
    return table[name]


_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matmul": ((256, 512), (512, 256)),
    "attention": ((2, 4, 128, 64),) * 3,
    "rmsnorm": ((256, 512), (512,)),
    "swiglu": ((256, 512),) * 2,
    "softmax": ((128, 512),),
    "cross_entropy": ((128, 1000),),
}


def numerics(
    torch: Any, where: Any, *, change: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None
) -> list[dict[str, Any]]:
    """Per operation and dtype: how far result and gradients are from fp64. `change` stands in for a wrong kernel."""
    rows = []
    for name in OPERATIONS:
        for dtype in DTYPES:
            rows.append({"operation": name, "dtype": dtype, **compare(torch, where, name, dtype, change)})
    return rows


def compare(torch: Any, where: Any, name: str, dtype: str, change: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    kind = getattr(torch, dtype)
    # rounded to the dtype first: both sides then start from the same numbers
    inputs = [torch.randn(*s, generator=generator, dtype=torch.float64).to(kind) for s in _SHAPES[name]]
    exact = run(torch, operation(torch, name), [t.double() for t in inputs])
    tried = operation(torch, name)
    tried = change(name, tried) if change else tried
    found = [t.detach().double().cpu() for t in run(torch, tried, [t.to(where) for t in inputs])]
    eps = torch.finfo(kind).eps
    errors = [distance(torch, a, b, eps) for a, b in zip(found, exact)]  # noqa: B905 - Python 3.8
    step = max(1, found[0].numel() // SAMPLE)
    return {
        "forward": errors[0],
        "backward": max(errors[1:], key=lambda e: float("inf") if e["mean_eps"] is None else e["mean_eps"]),
        "sample": [float(v) for v in found[0].flatten()[::step][:SAMPLE].tolist()],
    }


def run(torch: Any, work: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """The result and the gradients of its product with a fixed direction."""
    leaves = [t.detach().clone().requires_grad_(True) for t in inputs]
    result = work(*leaves)
    generator = torch.Generator().manual_seed(SEED + 1)
    direction = torch.randn(result.shape, generator=generator, dtype=torch.float64).bfloat16()
    result.backward(direction.to(result))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def distance(torch: Any, found: Any, exact: Any, eps: float) -> dict[str, float | None]:
    """Differences over the reference's root mean square, in units of eps; `scale_eps` is a common factor's error."""
    if not bool(torch.isfinite(found).all()):
        return {"max_eps": None, "mean_eps": None, "scale_eps": None, "cosine": None}
    a, b = found.flatten(), exact.detach().double().cpu().flatten()
    size = float(b.pow(2).mean().sqrt()) or 1.0
    difference = (a - b).abs()
    dot, norm = float(a @ b), float(b @ b) or 1.0
    return {
        "max_eps": float(difference.max()) / size / eps,
        "mean_eps": float(difference.mean()) / size / eps,
        "scale_eps": (dot / norm - 1.0) / eps,
        "cosine": dot / ((float(a @ a) * norm) ** 0.5 or 1.0),
    }
