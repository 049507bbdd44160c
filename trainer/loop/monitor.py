"""What ranks tell each other of their speeds during a run: stragglers are named, work follows speeds where asked."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from hetctl.comm.contract.events import Note, Reporter
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.adapt.pace import Paces, rebalanced, stragglers, why_fixed
from hetctl.trainer.adapt.resplit import resplit, why_uncut
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.ranks.timeline import COMPUTE, WEIGHTS

FIRST_CHECKS = (10, 30)  # steps after the start
EVERY = 100  # and so often from then on
WARM_UP = 2  # steps that are slow for reasons of their own: compilation, connections
FEWEST = 3  # steps measured before layers move


class SpeedMonitor:
    """Compares all ranks' paces now and then; every rank calls the same methods after the same steps."""

    def __init__(self, trainer: Trainer, reporter: Reporter, *, adapt: bool) -> None:
        self.trainer, self.reporter = trainer, reporter
        plan = trainer.job.plan
        fixed, uncut = why_fixed(plan), why_uncut(plan, trainer.job.recipe)
        self.counts, self.cuts = adapt and not fixed, adapt and not uncut
        self.named: dict[int, dict[str, Any]] = {}
        self.adapted: list[dict[str, Any]] = []
        self.recut: list[dict[str, Any]] = []
        self._steps = 0  # since the start
        self._measured = -WARM_UP  # since counts last changed
        if adapt and fixed and uncut:
            reporter.emit(Note(f"--adapt changes nothing: {fixed}; {uncut}"))
        elif self.cuts and not trainer.job.recipe.checkpoint.every:
            sentence = (
                "--adapt moves layers at checkpoints only, and this run makes none on its way: checkpoint.every=N"
            )
            reporter.emit(Note(sentence))

    def after(self, step: int) -> None:
        """A step has ended: compare, if it is time."""
        self._steps += 1
        self._measured += 1
        if self._steps in FIRST_CHECKS or self._steps % EVERY == 0:
            self.check(step)

    @property
    def findings(self) -> dict[str, Any]:
        """For the run's summary."""
        return {"stragglers": list(self.named.values()), "adapted": self.adapted, "recut": self.recut}

    def check(self, step: int, *, last: bool = False) -> None:
        """Gather paces, name stragglers that are new, and change counts where that was asked for and helps."""
        plan, paces = self.trainer.job.plan, self._paces()
        for found in stragglers(plan, paces):
            if found.rank not in self.named:
                self.reporter.emit(Note(found.sentence, of_pace=True))
            self.named[found.rank] = asdict(found)
        if self.counts and _complete(plan, paces) and not last and (better := rebalanced(plan, paces)):
            before, after = ([r.stages[0].micro_batches for r in p.replicas] for p in (plan, better))
            self.adapted.append({"step": step, "before": before, "after": after})
            self.reporter.emit(Note(f"counts follow speeds from step {step + 1} on: {before} -> {after}"))
            self.trainer.follow(better)
            self._measured = 0

    def better_layers(self, step: int) -> Plan | None:
        """A checkpoint was begun: the plan whose layers follow speeds, where that was asked for and helps."""
        if not self.cuts or self._measured < FEWEST:
            return None
        plan, paces = self.trainer.job.plan, self._paces()
        if not _complete(plan, paces):
            return None
        better = resplit(plan, paces, tied=self.trainer.job.shape.tied_embeddings)
        if better is not None:
            before, after = ([[s.depth for s in r.stages] for r in p.replicas] for p in (plan, better))
            self.recut.append({"step": step, "before": before, "after": after})
            self.reporter.emit(Note(f"layers follow speeds from step {step + 1} on: {before} -> {after}"))
        return better

    def follow(self, trainer: Trainer) -> None:
        """The run has another trainer from now on: what was measured before says nothing of it."""
        self.trainer, self._measured = trainer, -WARM_UP

    def _paces(self) -> dict[int, float]:
        """Everybody's, of those that know theirs."""
        everybody: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, pace_of(self.trainer, self._measured))
        return {rank: pace for rank, pace in enumerate(everybody) if pace is not None}


def _complete(plan: Plan, paces: Paces) -> bool:
    """Whether all ranks that have work know their pace."""
    return all(r.replica is None or r.rank in paces for r in plan.ranks)


def pace_of(trainer: Trainer, most: int) -> float | None:
    """Seconds of computing per micro-batch in the latest steps (the median of at most `most`); None: unknown."""
    found = []
    for spans in list(trainer.timeline.steps)[-most:] if most > 0 else ():
        compute = sum(s.end - s.start for s in spans if s.kind in COMPUTE)
        compute -= sum(s.end - s.start for s in spans if s.kind == WEIGHTS)  # waited for inside a forward
        micro_batches = len({s.micro_batch for s in spans if s.kind == "F"})
        if micro_batches:
            found.append(compute / micro_batches)
    return statistics.median(found) if found else None
