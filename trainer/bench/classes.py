"""One rank of `hetctl bench ops --cluster`: its device over some shapes, each reported as soon as it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract import variables
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.events import Reporter
from hetctl.comm.contract.values import decode, encode
from hetctl.comm.operation.device import has_streams, rank_device
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure
from hetctl.trainer.bench.ops import measure_class
from hetctl.trainer.planning.profile import ClassProfile

WARM_S = 0.5  # of work before each: what was measured just before has kept the device warm


def measure_shapes(
    shapes: Sequence[ShapeToMeasure], device_class: str, device: torch.device, precision: Precision | None = None
) -> Iterator[tuple[ShapeToMeasure, ClassProfile | None]]:
    """Each shape and what was measured of it; None where not even its first samples fit on the device."""
    update_s: float | None = None
    for row in shapes:
        entry: ClassProfile | None = None
        try:
            entry = measure_class(
                row.shape,
                row.seq_len,
                device_class=device_class,
                device=device,
                samples=row.samples,
                precision=precision,
                warm_s=WARM_S,
                update_s=update_s,
            )
            update_s = entry.update_s
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
    mine, reporter, device = decode(ClassToMeasure, asked, where="class"), Reporter(active=True), rank_device()
    if not has_streams(device):
        share_cores(mine.processes)
    problem: str | None = None
    try:
        for number, (row, entry) in enumerate(
            measure_shapes(mine.shapes, mine.device_class, device, mine.precision), 1
        ):
            at = {"device_class": mine.device_class, "shape": row.name, "number": number, "of": len(mine.shapes)}
            reporter.figures("shape", **at, entry=encode(entry))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    reporter.figures("ended", device_class=mine.device_class, problem=problem)


if __name__ == "__main__":
    main()
