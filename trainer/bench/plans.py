"""One rank of `hetctl bench plans`: whole training steps of several plans, one plan after the other."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract import variables
from hetctl.comm.contract.events import Reporter
from hetctl.comm.contract.placement import current_placement
from hetctl.comm.contract.values import decode
from hetctl.comm.group import autoload
from hetctl.comm.operation.device import has_streams, module_of, peak_device_memory, rank_device
from hetctl.comm.operation.work import PrefixStore
from hetctl.trainer.bench.samples import RandomSamples, settle
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from hetctl.trainer.ranks.emulated_device import at_speed, cap_memory
from hetctl.trainer.ranks.timeline import Span

WARM_UP = 2


def measure(job: Job, device: torch.device, steps: int) -> dict[str, Any]:
    """Seconds of each of `steps` steps after two that do not count, what every rank spent them on, and the most memory
    that each held, where its device counts it.

    They follow each other as in a run: what a step leaves on its way, such as weights for the next forward, is the next
    one's. Each step's host waits for its device where the loss is agreed on, so the time of its return is the device's.
    """
    with device:
        data = RandomSamples(job.shape.vocab, job.plan.seq_len, pairs=job.recipe.dpo.beta is not None)
        trainer = build(job, device, training=data)
    returned = []
    for number in range(WARM_UP + steps):
        trainer.train_step(number)
        returned.append(time.perf_counter())
        trainer.timeline.end_step()
    settle(device)
    seconds = [after - before for before, after in pairwise(returned[WARM_UP - 1 :])]
    trainer.batches.close()
    trainer.gradients.close()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (_spent(list(trainer.timeline.steps)[-steps:]), peak_device_memory(device)))
    spent, peaks = zip(*every, strict=True)
    return {"seconds": seconds, "spent_s": spent, "memory_bytes": peaks}


def _spent(steps: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Seconds of a step that this rank spent in each kind of span, the mean of these steps."""
    seconds: dict[str, float] = {}
    for span in chain.from_iterable(steps):
        seconds[span.kind] = seconds.get(span.kind, 0.0) + (span.end - span.start) / len(steps)
    return seconds


@contextmanager
def placed(text: str) -> Iterator[None]:
    """Process groups made inside see the islands of this placement."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        os.environ[variables.PLACEMENT] = file.name
        current_placement.cache_clear()
        yield


def one_plan(
    job: Job, number: int, device: torch.device, store: Callable[[], tuple[Any, int, int]], steps: int
) -> dict[str, Any]:
    """A plan in process groups of its own, so that nothing of it stays behind."""
    base, rank, world = store()
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        "het", store=PrefixStore(f"plan{number}/", base), rank=rank, world_size=world, timeout=timeout
    )
    cap_memory(device, job.plan.ranks[rank].memory_bytes)
    with at_speed(device, job.plan.ranks[rank].speed) as reduced:
        found = measure(job, device, steps)
    dist.destroy_process_group()  # not after an error: peers may be gone, and leaving politely would wait for them
    gc.collect()
    if has_streams(device):
        module_of(device).empty_cache()
        module_of(device).reset_peak_memory_stats()
    return found | {"slower": str(reduced) if reduced else None}


@record
def main() -> None:
    """Run every plan, report each from rank 0."""
    jobs = [decode(Job, j, where="job") for j in json.loads(Path(os.environ[variables.BENCH_JOBS]).read_text("utf-8"))]
    placements = json.loads(Path(os.environ[variables.BENCH_PLACEMENTS]).read_text("utf-8"))
    device = rank_device()
    autoload.register()
    found = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=jobs[0].timeout_s))))
    reporter = Reporter(active=found[1] == 0)
    for number, job in enumerate(jobs):
        with placed(placements[number]):
            outcome = one_plan(job, number, device, lambda: found, int(os.environ[variables.BENCH_STEPS]))
        reporter.figures("plan", number=number, **outcome)


if __name__ == "__main__":
    main()
