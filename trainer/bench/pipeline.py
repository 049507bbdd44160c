"""One rank of `hetctl bench pipeline`: the same stages and steps over native groups, the bridge, and naive copies.

The variants take turns step by step in one run, so that their ratio holds on a noisy machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract import variables
from hetctl.comm.contract.events import Reporter
from hetctl.comm.contract.natives import backend_words, native_of
from hetctl.comm.group import autoload
from hetctl.comm.operation.device import accelerator, peak_device_memory, rank_device
from hetctl.trainer.bench.samples import RandomSamples, settle
from hetctl.trainer.job import Job, current_job
from hetctl.trainer.loop.build import build
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.pipeline.boundary import Boundary
from hetctl.trainer.pipeline.pipeline import StagePipeline
from hetctl.trainer.ranks.groups import ProcessGroups, create_groups
from hetctl.trainer.schedule import SCHEDULES


class NativeBoundary(Boundary):
    """Transfers over the native library, also between ranks that the plan puts into two islands."""

    def _waits_on_host(self) -> bool:
        return accelerator() is None


class NaiveBoundary(Boundary):
    """What people write first: wait for the device, copy to pageable memory, send, receive, copy back."""

    def carries(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def send(self, data: Tensor) -> None:
        super().send(data.detach().cpu())

    def post(self, like: Tensor) -> tuple[Tensor, list[Any]]:
        host, works = super().post(torch.empty_like(like, device="cpu"))
        buffer = torch.empty_like(like)
        return buffer, [_CopyBack(host, works, buffer)]


@dataclass
class _CopyBack:
    host: Tensor
    works: list[Any]
    buffer: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.buffer.copy_(self.host)


def variants(trainer: Trainer, job: Job, timeout: timedelta) -> dict[str, StagePipeline]:
    """Ways to run it: native with both schedules (the better one is the yardstick), bridged as planned, and naive."""
    plan, place, models = job.plan, trainer.place, trainer.models
    stages, count = len(plan.forwards_ahead), plan.replicas[0].stages[0].micro_batches
    plain, eager = (SCHEDULES[name].in_flight(stages, count) for name in ("1f1b", "eager-1f1b"))

    def pipeline(ahead: tuple[int, ...], groups: ProcessGroups, kind: type[Boundary] = Boundary) -> StagePipeline:
        if not models:
            return trainer.pipeline  # of a rank without a stage
        planned = replace(plan, forwards_ahead=ahead)
        return StagePipeline(planned, place, models, groups, timeline=trainer.timeline, boundary=kind)

    host = create_groups(plan, timeout=timeout, backend="gloo")
    ways = {"bridged": trainer.pipeline, "naive": pipeline(plain, host, NaiveBoundary)}
    if not os.environ.get(variables.BENCH_NATIVE):
        return ways
    native = create_groups(plan, timeout=timeout, backend=native_of(device_type=trainer.device.type).torch_backend)
    return {
        "native 1f1b": pipeline(plain, native, NativeBoundary),
        "native eager": pipeline(eager, native, NativeBoundary),
        **ways,
    }


def measure(
    trainer: Trainer, ways: dict[str, StagePipeline], rounds: int, note: Callable[..., None]
) -> dict[str, list[float]]:
    """Tokens per second of each variant in each round, after one round that does not count."""
    tokens = trainer.job.plan.global_batch * trainer.job.plan.seq_len
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, pipeline in ways.items():
            trainer.pipeline = pipeline
            settle(trainer.device)
            begin = time.perf_counter()
            trainer.train_step(number)
            settle(trainer.device)
            seconds = time.perf_counter() - begin
            trainer.timeline.end_step()
            if number:
                rates[name].append(tokens / seconds)
        note(round=number, rounds=rounds)
    return rates


@record
def main() -> None:
    """Build the stages, let the variants take turns, report from rank 0."""
    job = current_job()
    rank, device = int(os.environ["RANK"]), rank_device()
    autoload.register()
    timeout = timedelta(seconds=job.timeout_s)
    own = backend_words(device.type)
    dist.init_process_group(own if os.environ.get(variables.BENCH_NATIVE) else "het", timeout=timeout)
    reporter = Reporter(active=rank == 0)
    with device:  # parameters are made where they will be: drawing billions of numbers on the host takes minutes
        trainer = build(job, device, training=RandomSamples(job.shape.vocab, job.plan.seq_len))
    ways = variants(trainer, job, timeout)
    rounds = int(os.environ.get(variables.BENCH_ROUNDS, "5"))
    rates = measure(trainer, ways, rounds, lambda **about: reporter.figures("round", **about))
    native = [n for n in rates if n.startswith("native")]
    best = max(native or ["bridged"], key=lambda n: statistics.median(rates[n]))
    ratios = {name: [a / b for a, b in zip(rates[name], rates[best], strict=True)] for name in rates if name != best}
    memory = peak_device_memory(device)
    reporter.figures("result", tokens_per_s=rates, best_native=best, ratios=ratios, peak_memory_bytes=memory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
