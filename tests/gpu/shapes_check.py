"""Estimates over shapes beside measurements, on one GPU (or the CPU): the grid is measured, then shapes it lacks.

PYTHONPATH=. python3 tests/gpu/shapes_check.py [--profile P] [--passes N]

A few minutes; prints a table and one JSON document. `--profile` keeps what was measured of the grid. On a CPU, which
others use too, the process's own seconds count, and of several passes over all shapes the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hetctl.comm.operation.device import accelerator
from hetctl.trainer.bench import ops
from hetctl.trainer.bench.classes import measure_shapes
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure, grid
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.planning.over_shapes import KINDS, Estimated, leave_one_out, serving
from hetctl.trainer.planning.profile import ClassProfile, Point, Profile, save_profile

Row = dict[str, Any]
LENGTHS = {  # of models on GPUs: those that the grid lacks, and its own at other lengths
    "llama-1b": (4096,),
    "llama-3b": (2048, 8192),
    "llama-8b": (2048, 8192),
    "llama2-7b": (4096,),
    "llama2-13b": (4096,),
    "qwen2-7b": (4096,),
}
SMALL = (ModelShape("wide", "llama", 4, 192, 6, 2, 512, 1024), ModelShape("narrow", "llama", 4, 96, 4, 4, 384, 512))


def held_out(device: torch.device) -> list[ShapeToMeasure]:
    """Shapes that the grid lacks."""
    if device.type == "cpu":
        rows = [(shape, n) for shape in (SHAPES["demo"], *SMALL) for n in (96, 256, 512)]
    else:
        rows = [(SHAPES[name], n) for name, lengths in LENGTHS.items() for n in lengths]
    return [ShapeToMeasure(replace(shape, layers=4), n, (1, 2)) for shape, n in rows]


def measure(shapes: Sequence[ShapeToMeasure], device: torch.device) -> dict[str, ClassProfile]:
    found = {}
    for row, entry in measure_shapes(ClassToMeasure("this", tuple(shapes)), device):
        print(f"{row.name}: {'measured' if entry else 'does not fit'}", file=sys.stderr, flush=True)
        if entry is not None:
            found[row.name] = entry
    return found


def least(passes: Sequence[dict[str, ClassProfile]]) -> dict[str, ClassProfile]:
    """Of each point the least seconds that any pass saw."""

    def points(entries: Sequence[ClassProfile], kind: str) -> tuple[Point, ...]:
        every = zip(*(getattr(e, kind) for e in entries), strict=True)
        return tuple(
            Point(p[0].samples, min(x.forward_s for x in p), min(x.backward_s for x in p)) for p in map(list, every)
        )

    return {
        name: replace(entry, **{kind: points([one[name] for one in passes], kind) for kind in KINDS})
        for name, entry in passes[0].items()
    }


def compare(entry: ClassProfile, told: ClassProfile) -> list[Row]:
    rows = []
    for kind in KINDS:
        for point in getattr(entry, kind):
            true, said = (point.forward_s, point.backward_s), told.at(kind, point.samples)
            what = {"model": entry.model, "seq_len": entry.seq_len, "layer": kind, "samples": point.samples}
            off = {"forward": said[0] / true[0] - 1, "backward": said[1] / true[1] - 1}
            seconds = {"measured_s": sum(true), "estimated_s": sum(said)}
            rows.append({**what, **seconds, "error": sum(said) / sum(true) - 1, **off})
    return rows


def show(rows: Sequence[Row]) -> None:
    print("model           length  layer      samples  measured ms  estimated ms   error  (forward, backward)")
    for r in rows:
        what = f"{r['model']:14} {r['seq_len']:7}  {r['layer']:10} {r['samples']:6}"
        off = f"{r['error']:+7.1%}  ({r['forward']:+.1%}, {r['backward']:+.1%})"
        print(f"{what}  {r['measured_s'] * 1e3:11.3f}  {r['estimated_s'] * 1e3:12.3f} {off}")
    for kind in KINDS:
        errors = [abs(r["error"]) for r in rows if r["layer"] == kind]
        print(f"{kind}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--passes", type=int, default=1)
    asked = parser.parse_args()
    kind = accelerator()
    device = torch.device("cpu" if kind is None else f"{kind}:0")
    if kind is None:
        torch.set_num_threads(1)
        ops.mark = lambda device: time.process_time()
    shapes = {s.name: s.shape for s in held_out(device)}
    passes, grid_s = [], []
    for _ in range(asked.passes):
        began = time.perf_counter()
        of_grid = measure(grid(device.type), device)
        grid_s.append(time.perf_counter() - began)
        passes.append((of_grid, measure(held_out(device), device)))
    profile = Profile(tuple(least([one for one, _ in passes]).values()))
    if asked.profile is not None:
        save_profile(asked.profile, profile)
    rows: list[Row] = []
    for name, entry in least([one for _, one in passes]).items():
        told = serving(profile, shapes[name], entry.seq_len)[0]
        assert isinstance(told, Estimated), "the grid has it"
        rows += compare(entry, told)
    show(rows)
    off = leave_one_out(profile.classes)
    print(f"the grid took {min(grid_s):.0f} s; leave-one-out {statistics.mean(off.values()):.1%}, by shape:")
    for (sizes, length), error in off.items():
        print(f"  hidden {sizes.hidden:5}, intermediate {sizes.intermediate:5}, length {length:5}: {error:.1%}")
    name = torch.cuda.get_device_name() if kind == "cuda" else str(device)
    print(json.dumps({"device": name, "grid_s": min(grid_s), "rows": rows}))


if __name__ == "__main__":
    main()
