"""One rank of `hetctl bench ops --cluster`, or of a tensor group: its device over some shapes, each told once known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract import variables
from hetctl.comm.contract.events import Reporter
from hetctl.comm.contract.values import decode, encode
from hetctl.comm.group import autoload
from hetctl.comm.operation.device import has_streams, rank_device
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure
from hetctl.trainer.bench.ops import measure_class
from hetctl.trainer.planning.profile import ClassProfile

WARM_S = 0.5  # of work before each: what was measured just before has kept the device warm


def measure_shapes(asked: ClassToMeasure, device: torch.device) -> Iterator[tuple[ShapeToMeasure, ClassProfile | None]]:
    """Each shape and what was measured of it; None where not even its first samples fit on the device."""
    known: ClassProfile | None = None
    for row in asked.shapes:
        entry: ClassProfile | None = None
        try:
            entry = measure_class(
                row.shape,
                row.seq_len,
                device_class=asked.device_class,
                device=device,
                samples=row.samples,
                tensor=asked.tensor,
                precision=asked.precision,
                warm_s=WARM_S,
                known=known,
            )
            known = entry
        except torch.OutOfMemoryError:
            pass
        yield row, entry


def share_cores(processes: int) -> None:
    """Compute on as many threads as a rank has beside so many others, or as its environment says if those are fewer."""
    mine = len(os.sched_getaffinity(0)) // processes
    torch.set_num_threads(max(1, min(torch.get_num_threads(), mine)))


@record
def main() -> None:
    """Measure, and say how it ended: what fails here shall not end the ranks that measure other classes."""
    asked = json.loads(Path(os.environ[variables.BENCH_CLASSES]).read_text("utf-8"))[int(os.environ["RANK"])]
    mine, device = decode(ClassToMeasure, asked, where="class"), rank_device()
    if mine.tensor > 1:
        autoload.register()
        dist.init_process_group("het")
    reporter = Reporter(active=mine.tensor == 1 or dist.get_rank() == 0)
    if not has_streams(device):
        share_cores(mine.processes)
    problem: str | None = None
    try:
        for number, (row, entry) in enumerate(measure_shapes(mine, device), 1):
            at = {"device_class": mine.device_class, "shape": row.name, "number": number, "of": len(mine.shapes)}
            reporter.figures("shape", **at, entry=encode(entry))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    reporter.figures("ended", device_class=mine.device_class, problem=problem)
    if mine.tensor > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
