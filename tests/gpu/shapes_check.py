"""Estimates over shapes beside measurements, on one GPU (or the CPU): the grid is measured, then shapes it lacks.

PYTHONPATH=. python3 tests/gpu/shapes_check.py [--profile P]     a few minutes; prints a table and one JSON document

`--profile` keeps what was measured of the grid, or takes it from there if the file is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hetctl.comm.operation.device import accelerator
from hetctl.trainer.bench.grid import ShapeToMeasure, grid, measure_shapes
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.planning.over_shapes import Estimated, leave_one_out, serving
from hetctl.trainer.planning.profile import ClassProfile, LayerKind, Profile, load_profile, save_profile

NAME = "this-device"


def held_out(on_gpu: bool) -> list[ShapeToMeasure]:
    """Shapes that the grid lacks: other models, and the grid's models at other lengths."""
    if not on_gpu:
        demo = replace(SHAPES["demo"], layers=4)
        wide = ModelShape("wide", "llama", 4, 192, 6, 2, 512, 1024)
        narrow = ModelShape("narrow", "llama", 4, 96, 4, 4, 384, 512)
        rows = [(demo, 256), (demo, 512), (wide, 128), (wide, 512), (narrow, 64), (narrow, 256)]
    else:
        named = [("llama-1b", 4096), ("llama-8b", 2048), ("llama-8b", 8192), ("qwen2-7b", 4096)]
        named += [("llama2-13b", 4096), ("llama-3b", 8192), ("llama2-7b", 4096)]
        rows = [(replace(SHAPES[name], layers=4), length) for name, length in named]
    return [ShapeToMeasure(shape, length, (1, 2)) for shape, length in rows]


def measure(rows: list[ShapeToMeasure], device: torch.device) -> list[ClassProfile]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = []
    for row, entry in measure_shapes(rows, NAME, device, dtype):
        print(f"{row.name}: {'measured' if entry else 'does not fit'}", file=sys.stderr, flush=True)
        found += [entry] if entry else []
    return found


def compare(entry: ClassProfile, told: ClassProfile, kind: LayerKind) -> list[dict[str, Any]]:
    rows = []
    for point in getattr(entry, kind):
        true, said = (point.forward_s, point.backward_s), told.at(kind, point.samples)
        rows.append(
            {
                "model": entry.model,
                "seq_len": entry.seq_len,
                "layer": kind,
                "samples": point.samples,
                "measured_s": sum(true),
                "estimated_s": sum(said),
                "error": sum(said) / sum(true) - 1,
                "forward": said[0] / true[0] - 1,
                "backward": said[1] / true[1] - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", type=Path)
    path = parser.parse_args().profile
    kind = accelerator()
    device = torch.device("cpu" if kind is None else f"{kind}:0")
    if kind is None:
        torch.set_num_threads(1)
    began = time.perf_counter()
    if path is not None and path.exists():
        profile = load_profile(path)
    else:
        profile = Profile(tuple(measure(list(grid(device)), device)))
        if path is not None:
            save_profile(path, profile)
    grid_s = time.perf_counter() - began
    rows = []
    for entry in measure(held_out(kind is not None), device):
        told = serving(profile, replace(SHAPES.get(entry.model, _shape(entry)), name="other"), entry.seq_len)[0]
        assert isinstance(told, Estimated)
        rows += [row for layer in ("block", "head", "embedding") for row in compare(entry, told, layer)]
    show(rows)
    off = leave_one_out(profile.classes)
    print(f"\nthe grid took {grid_s:.0f} s; leave-one-out: {sum(off.values()) / len(off):.1%}, by shape:")
    for (sizes, length), error in off.items():
        print(f"  hidden {sizes.hidden:5} intermediate {sizes.intermediate:6} length {length:6}: {error:.1%}")
    print(json.dumps({"device": torch.cuda.get_device_name() if kind == "cuda" else str(device), "rows": rows}))


def _shape(entry: ClassProfile) -> ModelShape:
    assert entry.sizes is not None
    s = entry.sizes
    return ModelShape("other", "llama", 4, s.hidden, s.heads, s.kv_heads, s.intermediate, s.vocab, s.head_dim)


def show(rows: list[dict[str, Any]]) -> None:
    print("model          length  layer      samples  measured ms  estimated ms   error  (forward, backward)")
    for r in rows:
        there = f"{r['measured_s'] * 1e3:11.3f}  {r['estimated_s'] * 1e3:12.3f}  {r['error']:+6.1%}"
        name = f"{r['model']:14} {r['seq_len']:6}  {r['layer']:10} {r['samples']:7}"
        print(f"{name}  {there}  ({r['forward']:+.1%}, {r['backward']:+.1%})")
    for layer in ("block", "head", "embedding"):
        errors = sorted(abs(r["error"]) for r in rows if r["layer"] == layer)
        print(f"{layer}: mean {sum(errors) / len(errors):.1%}, worst {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
