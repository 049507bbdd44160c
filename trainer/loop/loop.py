"""A run over steps: what goes with them (reports, checkpoints, validation, adapting), how it begins and how it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.events import Begin, Note, Reporter, Step, TrainingEnded, Validated, no_better
from hetctl.comm.group import backend
from hetctl.trainer.checkpoint.best import NONE_YET, BestSoFar
from hetctl.trainer.checkpoint.per_host import make_file_group
from hetctl.trainer.data.datasets import open_sides
from hetctl.trainer.data.sources import check_pairs
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build, rebuild, resume, save_with
from hetctl.trainer.loop.figures import StepFigures, peak_memory
from hetctl.trainer.loop.monitor import SpeedMonitor
from hetctl.trainer.loop.profiling import profiled
from hetctl.trainer.loop.samples import sampled
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.ranks.timeline import on_one_clock, replica_spread, shares
from hetctl.trainer.ranks.versions import versions_here

SKIPS_SAID = 5


def run(job: Job, device: torch.device, reporter: Reporter) -> None:
    """Train from the first step (or the checkpoint's) to the last, or until asked to stop; then validate and save."""
    file_group = make_file_group()
    plan, data = job.plan, job.recipe.data
    check_pairs(data, wanted=job.recipe.dpo.beta is not None)
    sides = open_sides(data, seq_len=plan.seq_len, global_batch=plan.global_batch, vocabulary=job.shape.vocab)
    _agree_on_text(sides.digest, file_group)
    versions = _versions(job, device, file_group)
    trainer = build(job, device, training=sides.training, validation=sides.validation)
    start = resume(trainer, Path(job.resume), file_group) if job.resume else 0
    goes_on = job.resume is not None and Path(job.resume).parent == Path(job.checkpoints)
    if not goes_on:  # another run's: what it reached is not this one's
        trainer.best = BestSoFar(seen=start)
        trainer.lately.clear()
    save_with(trainer, reporter, file_group, beyond=start if goes_on else 0)
    trainer.requests.listen()
    reporter.emit(Begin(start, job.recipe.train.steps, sides.digest, versions))
    for known in trainer.lately:
        reporter.emit(known)
    for sentence in sides.said:
        reporter.emit(Note(sentence))
    steps = Steps(trainer, reporter, file_group, start=start, saved=start if goes_on else -1)
    steps.train()
    steps.end()


class Steps:
    """The steps of a run: what is done so far, and by which trainer."""

    def __init__(self, trainer: Trainer, reporter: Reporter, file_group: Any, *, start: int, saved: int) -> None:
        self.trainer, self.reporter, self.file_group = trainer, reporter, file_group
        self.recipe = trainer.job.recipe
        self.monitor = SpeedMonitor(trainer, reporter, adapt=self.recipe.train.adapt)
        self.done, self.saved = start, saved
        self.skipped, self.validations = 0, list[dict[str, Any]]()
        self.train_s = self._validating_s = 0.0

    def train(self) -> None:
        """All steps, with validation and checkpoints among them, until all ranks agree to stop."""
        began = time.monotonic()
        self._validate_if_due()  # an interrupted attempt left it out
        for step in range(self.done, self.trainer.job.first_steps or self.recipe.train.steps):
            if self._has_stalled:
                self._say_why_it_ends()
                break
            if not (figures := self._timed_step(step)).finite:
                self._report_skip(step, figures)
            self.done = step + 1
            self.monitor.after(self.done)
            if self.trainer.requests.stopping:
                break
            self._validate_if_due()
            self._save_if_due()
        self.train_s = time.monotonic() - began - self._validating_s

    def end(self) -> None:
        """Validate (unless interrupted), save what is not saved yet, and report what the run came to."""
        interrupted = self.trainer.requests.stopping and self._more_to_come
        validation = None if interrupted else self._last_validation()
        if self.saved != self.done and (self.recipe.checkpoint.last or interrupted or self._is_to_be_saved):
            self.trainer.save(self.done)
        if self.trainer.saving is not None:
            self.trainer.saving.finish()
        self.trainer.batches.close()
        self.monitor.check(self.done, last=True)
        best = self._best if self.recipe.train.validate_every else NONE_YET  # of one there is no best
        end = {
            "steps": self.done,
            "interrupted": interrupted,
            "validation_loss": validation,
            **({} if interrupted else self._preferred),
            "validations": self.validations,
            "best_step": best.step if best.loss is not None else None,
            "best_validation_loss": best.loss,
            "stalled": best.since if self._has_stalled and self._more_to_come else None,
            "skipped_steps": self.skipped,
            "train_s": self.train_s,
        }
        summarise(self.trainer, self.reporter, end | self.monitor.findings)

    @property
    def _best(self) -> BestSoFar:
        return self.trainer.best

    @property
    def _has_stalled(self) -> bool:
        """Whether so many validations were no better that the recipe says to end here."""
        patience = self.recipe.train.patience
        return patience is not None and self._best.since >= patience

    @property
    def _is_to_be_saved(self) -> bool:
        keeping = self.recipe.checkpoint
        due = keeping.every > 0 and self.done % keeping.every == 0
        best = keeping.keep_best and self._best.step == self.done and self._best.loss is not None
        return due or best or self.trainer.requests.save_now

    @property
    def _preferred(self) -> dict[str, float]:
        return self.trainer.validated.preferred if self.trainer.validated else {}

    @property
    def _more_to_come(self) -> bool:
        return self.done < self.recipe.train.steps

    def _timed_step(self, step: int) -> StepFigures:
        trainer, began = self.trainer, time.monotonic()
        with profiled(trainer.job, step, trainer.device, trainer.timeline):
            figures = trainer.train_step(step)
            trainer.timeline.end_step()
        seconds = time.monotonic() - began
        record = asdict(figures) | {"step_time_s": seconds, "tokens_per_s": figures.tokens / seconds}
        trainer.lately.append(Step(step + 1, **record, **trainer.islands.report()))
        self.reporter.emit(trainer.lately[-1])
        return figures

    def _report_skip(self, step: int, figures: StepFigures) -> None:
        self.skipped += 1
        if self.skipped <= SKIPS_SAID:
            rest = "; further ones are only counted" if self.skipped == SKIPS_SAID else ""
            why = "its loss or gradient is not finite"
            if figures.overflowed:
                why = f"its gradient leaves fp16 at a loss scale of {figures.loss_scale:.0f}, which is halved"
            self.reporter.emit(Note(f"step {step + 1} changed nothing: {why}{rest}"))

    def _say_why_it_ends(self) -> None:
        self.reporter.emit(Note(f"ended after step {self.done}: {no_better(self._best.since, self._best.step)}"))

    def _save_if_due(self) -> None:
        """Layers move at checkpoints only: the ranks go on from one under another plan.

        A validation is before the save of its step, which keeps it; what is due at the end, `end` does.
        """
        if self._is_to_be_saved and self._more_to_come and not self._has_stalled:
            self.trainer.save(self.done)
            self.saved = self.done
            if plan := self.monitor.better_layers(self.done):
                self.trainer = rebuild(self.trainer, plan, self.done, self.reporter, self.file_group)
                self.monitor.follow(self.trainer)

    def _validate_if_due(self) -> None:
        every = self.recipe.train.validate_every
        if every and self.done % every == 0 and self._more_to_come and self._best.seen != self.done:
            began = time.monotonic()
            self.validations.append({"step": self.done, "validation_loss": self._validate(), **self._preferred})
            self.reporter.emit(Validated(**self.validations[-1]))
            self._validating_s += time.monotonic() - began

    def _last_validation(self) -> float | None:
        """Of the weights as the run ends: the one that ended it, or one more."""
        if self.validations and self.validations[-1]["step"] == self.done:
            return cast(float | None, self.validations[-1]["validation_loss"])
        return self._validate()

    def _validate(self) -> float | None:
        loss = self.trainer.validate()
        self.trainer.best = self._best.after(self.done, loss)
        self._show_samples()
        return loss

    def _show_samples(self) -> None:
        for sample in sampled(self.trainer, self.done):
            self.reporter.emit(sample)


def _agree_on_text(digest: str, file_group: Any) -> None:
    """Raise ConfigError unless all ranks read the same tokens: hosts may hold different copies of the data."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, digest, group=file_group)
    strange = [rank for rank, other in enumerate(everybody) if other != everybody[0]]
    if strange:
        raise ConfigError(
            f"ranks {', '.join(map(str, strange[:16]))} read other text than rank 0",
            hint="give all hosts the same data (python-stdlib differs between versions of Python)",
        )


def _versions(job: Job, device: torch.device, file_group: Any) -> dict[str, dict[str, str]]:
    """Each host's, as its first rank finds them; of an island there that has others, also these: `host (island)`."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, versions_here(device), group=file_group)
    found: dict[str, dict[str, str]] = {}
    island_of = {rank: island.name for island in job.plan.islands for rank in island.ranks}
    for rank, versions in zip(job.plan.ranks, everybody, strict=True):
        if found.setdefault(rank.host, versions) != versions:
            found.setdefault(f"{rank.host} ({island_of[rank.rank]})", versions)
    return found


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
    done = trainer.so_far
    if done.first is None or done.latest is None:  # the checkpoint was the last one already
        reporter.emit(TrainingEnded(**end))
        return
    plan = trainer.job.plan
    spans = on_one_clock([e["spans"] for e in everybody], [r.host for r in plan.ranks])
    told = TrainingEnded(
        **end,
        first_loss=done.first.loss,
        last_loss=done.latest.loss,
        tokens=done.tokens,
        tokens_per_s=done.tokens / end["train_s"],
        bridge_bytes=sum(e["bridge_bytes"] for e in everybody),
        memory_bytes=tuple(e["memory_bytes"] for e in everybody),
        shares=asdict(shares(spans)),
        island_shares={i.name: asdict(shares(spans, i.ranks)) for i in plan.islands},
        replica_spread=replica_spread(spans, [r.replica for r in plan.ranks]),
        timeline=tuple(tuple(asdict(s) for s in steps[-1]) if steps else () for steps in spans),
    )
    reporter.emit(told)
