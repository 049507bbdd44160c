"""A trace of one step by torch's profiler, one file per rank, for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hetctl.trainer.job import Job


@contextmanager
def profiled(job: Job, step: int, device: torch.device) -> Iterator[None]:
    """Trace what happens inside if this is the step the recipe names; the file is profile/rank-N.json of the run."""
    if job.recipe.train.profile_step != step + 1:
        yield
        return
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as found:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    folder = Path(job.checkpoints).parent / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"rank-{dist.get_rank()}.json"))
