"""What ranks tell each other of their speeds during a run: stragglers are named, counts follow speeds where asked.

Besides, where each island's time goes: that travels with every step's figures, for a person who looks on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.rank_events import Reporter
from hetctl.trainer.adapt.pace import Paces, rebalanced, stragglers, why_fixed
from hetctl.trainer.adapt.resplit import resplit, why_uncut
from hetctl.trainer.loop.summary import peak_memory
from hetctl.trainer.ranks.timeline import COMPUTE, WEIGHTS, Span, Spent, spent

if TYPE_CHECKING:
    from hetctl.trainer.loop.loop import Trainer

FIRST_LOOKS = (10, 30)  # steps after the start
EVERY = 100  # and so often from then on
WARM_UP = 2  # steps that are slow for reasons of their own: compilation, connections
FEWEST = 3  # steps measured before layers move
LOOK_S = 1.0  # between two looks of a person: memory is read, and islands are reported, no more often
SPENT = tuple(f.name for f in fields(Spent))
WIDTH = len(SPENT) + 1  # slots of an island in what ranks sum


class Watch:
    """Looks at all ranks' paces now and then; every rank calls the same methods after the same steps."""

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
            reporter.emit("note", sentence=f"--adapt changes nothing: {fixed}; {uncut}")
        elif self.cuts and not trainer.job.recipe.checkpoint.every:
            sentence = (
                "--adapt moves layers at checkpoints only, and this run makes none on its way: checkpoint.every=N"
            )
            reporter.emit("note", sentence=sentence)

    def after(self, step: int) -> None:
        """A step has ended: look, if it is time."""
        self._steps += 1
        self._measured += 1
        if self._steps in FIRST_LOOKS or self._steps % EVERY == 0:
            self.look(step)

    @property
    def findings(self) -> dict[str, Any]:
        """For the run's summary."""
        return {"stragglers": list(self.named.values()), "adapted": self.adapted, "recut": self.recut}

    def look(self, step: int, *, last: bool = False) -> None:
        """Gather paces, name stragglers that are new, and change counts where that was asked for and helps."""
        plan, paces = self.trainer.job.plan, self._paces()
        for found in stragglers(plan, paces):
            if found.rank not in self.named:
                self.reporter.emit("note", sentence=found.sentence)
            self.named[found.rank] = asdict(found)
        if self.counts and _complete(plan, paces) and not last and (better := rebalanced(plan, paces)):
            before, after = ([r.stages[0].micro_batches for r in p.replicas] for p in (plan, better))
            self.adapted.append({"step": step, "before": before, "after": after})
            self.reporter.emit("note", sentence=f"counts follow speeds from step {step + 1} on: {before} -> {after}")
            self.trainer.follow(better)
            self._measured = 0

    def cut_anew(self, step: int) -> Plan | None:
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
            self.reporter.emit("note", sentence=f"layers follow speeds from step {step + 1} on: {before} -> {after}")
        return better

    def goes_on_with(self, trainer: Trainer) -> None:
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


class Seen:
    """Where each island's time and memory go: one vector, summed with the step's figures, so that nobody waits more.

    An island has a slot for each of `Spent` and one for how many of its ranks know theirs. Each rank has a slot for
    its memory, because a sum knows no largest.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.islands, self.device = plan.islands, device
        self.sums: Sequence[float] = ()  # over all ranks, as of the latest step
        self._part = torch.zeros(WIDTH * len(plan.islands) + plan.world_size, dtype=torch.float64, device="cpu")
        first = WIDTH * next(n for n, island in enumerate(plan.islands) if rank in island.ranks)
        self._time = self._part[first : first + WIDTH]
        self._memory = self._part[rank - plan.world_size :][:1]
        self._read_at = self._told_at = -LOOK_S

    def part(self, spans: Sequence[Span] | None) -> torch.Tensor:
        """What this rank adds: where its latest step went, if it knows, and its memory."""
        if spans:
            self._time.copy_(torch.tensor([*asdict(spent(spans)).values(), 1.0], dtype=torch.float64, device="cpu"))
        if (now := time.monotonic()) - self._read_at >= LOOK_S:
            self._read_at = now
            self._memory.fill_(peak_memory(self.device))
        return self._part.pin_memory() if self.device.type == "cuda" else self._part

    def told(self) -> dict[str, Any]:
        """By island the mean seconds of its ranks and the most memory on any, for metrics; nothing too soon again."""
        if not self.sums or (now := time.monotonic()) - self._told_at < LOOK_S:
            return {}
        found = {}
        for number, island in enumerate(self.islands):
            *seconds, knowing = self.sums[WIDTH * number : WIDTH * (number + 1)]
            if knowing:
                memory = max(self.sums[WIDTH * len(self.islands) + rank] for rank in island.ranks)
                means = {f"{name}_s": total / knowing for name, total in zip(SPENT, seconds, strict=True)}
                found[island.name] = {**means, "memory_bytes": int(memory)}
        if found:
            self._told_at = now
        return {"islands": found} if found else {}
