"""What ranks tell each other of their speeds during a run: stragglers are named, counts follow speeds where asked."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetctl.comm.reporter import Reporter
from hetctl.trainer.pace import rebalanced, stragglers, why_fixed
from hetctl.trainer.timeline import WEIGHTS

if TYPE_CHECKING:
    from hetctl.trainer.loop import Trainer

FIRST_LOOKS = (10, 30)  # steps after the start
EVERY = 100  # and so often from then on
WARM_UP = 2  # steps that are slow for reasons of their own: compilation, connections


class Watch:
    """Looks at all ranks' paces now and then; every rank calls the same methods after the same steps."""

    def __init__(self, trainer: Trainer, reporter: Reporter, *, adapt: bool) -> None:
        self.trainer, self.reporter = trainer, reporter
        self.adapt = adapt
        self.named: dict[int, dict[str, Any]] = {}
        self.adapted: list[dict[str, Any]] = []
        self._steps = 0  # since the start
        self._measured = -WARM_UP  # since counts last changed
        if adapt and (why := why_fixed(trainer.job.plan)):
            self.adapt = False
            reporter.emit("note", sentence=f"--adapt changes nothing: {why}")

    def after(self, step: int) -> None:
        """A step has ended: look, if it is time."""
        self._steps += 1
        self._measured += 1
        if self._steps in FIRST_LOOKS or self._steps % EVERY == 0:
            self.look(step)

    @property
    def findings(self) -> dict[str, Any]:
        """For the run's summary."""
        return {"stragglers": list(self.named.values()), "adapted": self.adapted}

    def look(self, step: int, *, last: bool = False) -> None:
        """Gather paces, name stragglers that are new, and change counts where that was asked for and helps."""
        everybody: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, pace_of(self.trainer, self._measured))
        paces = {rank: pace for rank, pace in enumerate(everybody) if pace is not None}
        plan = self.trainer.job.plan
        for found in stragglers(plan, paces):
            if found.rank not in self.named:
                self.reporter.emit("note", sentence=found.sentence)
            self.named[found.rank] = asdict(found)
        complete = all(r.replica is None or r.rank in paces for r in plan.ranks)
        if self.adapt and complete and not last and (better := rebalanced(plan, paces)):
            before, after = ([r.stages[0].micro_batches for r in p.replicas] for p in (plan, better))
            self.adapted.append({"step": step, "before": before, "after": after})
            self.reporter.emit("note", sentence=f"counts follow speeds from step {step + 1} on: {before} -> {after}")
            self.trainer.follow(better)
            self._measured = 0


def pace_of(trainer: Trainer, most: int) -> float | None:
    """Seconds of computing per micro-batch in the latest steps (the median of at most `most`); None: unknown."""
    found = []
    for spans in list(trainer.timeline.steps)[-most:] if most > 0 else ():
        compute = sum(s.end - s.start for s in spans if s.kind in ("F", "B", "W"))
        compute -= sum(s.end - s.start for s in spans if s.kind == WEIGHTS)  # waited for inside a forward
        micro_batches = len({s.micro_batch for s in spans if s.kind == "F"})
        if micro_batches:
            found.append(compute / micro_batches)
    return statistics.median(found) if found else None
