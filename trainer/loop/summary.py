"""What a run came to, collected from all ranks and reported by the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from hetctl.comm.contract.events import Reporter, TrainingEnded
from hetctl.comm.group import backend
from hetctl.trainer.loop.figures import peak_memory
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.ranks.timeline import on_one_clock, replica_spread, shares


def summarise(trainer: Trainer, reporter: Reporter, end: Mapping[str, Any]) -> None:
    """Report `end` (steps, interrupted, validation_loss, train_s, ..) with what only ranks know.

    `train_s` are the seconds from the first step to the last one's end, saving included and validating not.
    """
    mine = {
        "spans": list(trainer.timeline.steps),
        "bridge_bytes": backend.bridge_bytes(),
        "memory_bytes": peak_memory(trainer.device),
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if not trainer.history:  # the checkpoint was the last one already
        reporter.emit(TrainingEnded(**end))
        return
    plan = trainer.job.plan
    spans = on_one_clock([e["spans"] for e in everybody], [r.host for r in plan.ranks])
    tokens = sum(f.tokens for f in trainer.history)
    told = TrainingEnded(
        **end,
        first_loss=trainer.history[0].loss,
        last_loss=trainer.history[-1].loss,
        tokens=tokens,
        tokens_per_s=tokens / end["train_s"],
        bridge_bytes=sum(e["bridge_bytes"] for e in everybody),
        memory_bytes=tuple(e["memory_bytes"] for e in everybody),
        shares=asdict(shares(spans)),
        island_shares={i.name: asdict(shares(spans, i.ranks)) for i in plan.islands},
        replica_spread=replica_spread(spans, [r.replica for r in plan.ranks]),
        timeline=tuple(tuple(asdict(s) for s in steps[-1]) if steps else () for steps in spans),
    )
    reporter.emit(told)
