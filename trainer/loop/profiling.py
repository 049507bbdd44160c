"""A trace of one step, one file per rank, for Perfetto or chrome://tracing.

Torch's profiler gives calls and kernels; beside them stand the rank's own actions, as its timeline knows them, and what
it had sent across islands by when.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hetctl.comm.group import backend
from hetctl.comm.operation.device import synchronize
from hetctl.trainer.job import Job
from hetctl.trainer.ranks.timeline import Span, Timeline

SAMPLE_S = 0.002
HEAD_BYTES = 2**20  # of a trace: what stands before its events
ROW = {"pid": "hetctl", "tid": "actions"}

Sample = tuple[float, int]  # the host's monotonic clock, bytes sent across islands until then


@contextmanager
def profiled(job: Job, step: int, device: torch.device, timeline: Timeline) -> Iterator[None]:
    """Trace the step that runs inside, its timeline's end included, if this is the one that the recipe names.

    The file is profile/rank-N.json of the run.
    """
    if job.recipe.train.profile_step != step + 1:
        yield
        return
    activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)}
    with profile(activities=activities) as found, _sent() as samples:
        yield
        synchronize(device)
    folder = Path(job.checkpoints).parent / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{dist.get_rank()}.json"
    found.export_chrome_trace(str(file))
    _add(file, timeline.steps[-1], samples)


def sent_before_backward_ended(spans: Sequence[Span], samples: Sequence[Sample]) -> float | None:
    """Which share of what a rank sent across islands in a step had left when its last backward ended.

    With data parallelism alone that is its gradients; a pipeline's activations count as well. None where it sent
    nothing or went backward nowhere.
    """
    ends = [s.end for s in spans if s.kind in ("B", "W")]
    first, last = samples[0][1], samples[-1][1]
    if not ends or first == last:
        return None
    times, counts = zip(*samples, strict=True)
    return (float(np.interp(max(ends), times, counts)) - first) / (last - first)


@contextmanager
def _sent() -> Iterator[list[Sample]]:
    """What has been sent so far, looked at while the block runs."""
    samples: list[Sample] = []
    over = threading.Event()

    def look() -> None:
        samples.append((time.monotonic(), backend.bridge_bytes()))

    def keep_looking() -> None:
        while not over.wait(SAMPLE_S):
            look()

    look()
    thread = threading.Thread(target=keep_looking, name="profiled-bytes", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        look()


def _add(file: Path, spans: Sequence[Span], samples: Sequence[Sample]) -> None:
    """Put a row of actions and a counter into a trace, at its head: traces of large models are long."""
    with file.open("rb") as source:
        head, events, _ = source.read(HEAD_BYTES).partition(b'"traceEvents": [')
    base = re.search(rb'"baseTimeNanoseconds": *(\d+)', head)
    if base is None or not events:
        warnings.warn(f"{file} has no row of actions: this torch writes another format of traces", stacklevel=2)
        return
    # its times are microseconds of the wall clock since that base
    offset = time.time() - time.monotonic() - int(base[1]) / 1e9

    def at(moment: float) -> float:
        return round((moment + offset) * 1e6, 3)

    added: list[dict[str, Any]] = [
        {"ph": "X", "name": _name(s), "ts": at(s.start), "dur": round((s.end - s.start) * 1e6, 3), **ROW} for s in spans
    ]
    changed = [samples[0], *(b for a, b in itertools.pairwise(samples) if a[1] != b[1])]
    added += [
        {"ph": "C", "name": "sent across islands", "ts": at(when), "pid": ROW["pid"], "args": {"MB": count / 1e6}}
        for when, count in ((w, c - samples[0][1]) for w, c in changed)
    ]
    summary = {
        "sent_bytes": samples[-1][1] - samples[0][1],
        "sent_before_backward_ended": sent_before_backward_ended(spans, samples),
    }
    body = ",\n".join(map(json.dumps, added))
    longer = file.with_suffix(".new")
    with file.open("rb") as source, longer.open("wb") as target:
        target.write(head + f'"hetctl": {json.dumps(summary)},\n'.encode() + events + f"\n{body},".encode())
        source.seek(len(head) + len(events))
        shutil.copyfileobj(source, target)
    longer.replace(file)


def _name(span: Span) -> str:
    words = [span.kind]
    if span.micro_batch >= 0:
        words.append(str(span.micro_batch))
    if span.peers:
        words.append(f"with {', '.join(map(str, span.peers))}")
    return " ".join(words)
