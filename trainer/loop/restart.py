"""A trainer's checkpoints: a place to save to, going on from one, and going on from one under another plan."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.comm.contract.events import Note, Reporter, Saved
from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import has_streams, module_of, synchronize
from hetctl.trainer.checkpoint import per_host, writer
from hetctl.trainer.checkpoint.per_host import Copier, make_copier
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.checkpoint.writer import Checkpoints
from hetctl.trainer.loop.build import build
from hetctl.trainer.loop.trainer import Trainer


def save_with(
    trainer: Trainer, reporter: Reporter, file_group: Any, *, beyond: int, copier: Copier | None = None
) -> None:
    """Give a trainer its checkpoints; those of later steps than `beyond` are put aside."""
    plan, recipe = trainer.job.plan, trainer.job.recipe.checkpoint
    trainer.saving = Checkpoints(
        Path(trainer.job.checkpoints),
        trainer.gradients,
        trainer.optimizer,
        keep=recipe.keep,
        beyond=beyond,
        file_group=file_group,
        copier=copier or make_copier([r.host for r in plan.ranks], recipe.store),
    )
    trainer.saving.on_commit = lambda step: reporter.emit(Saved(step))
    if trainer.saving.superseded is not None:
        moved = f"checkpoints of steps that this run makes anew are kept in {trainer.saving.superseded}"
        reporter.emit(Note(moved))


def resume(trainer: Trainer, path: Path, file_group: Any) -> int:
    """Load a checkpoint, fetching from other hosts what this one lacks. Returns the steps done."""
    needed = [slot.name for bucket in trainer.gradients.buckets for slot in bucket.layout.slots]
    here = per_host.gather(path, needed, group=file_group)
    Reader(here).check_is_of(trainer.job.shape, whole=False)
    start, trainer.updates = writer.load(here, trainer.gradients, trainer.optimizer)
    per_host.release(here, group=file_group)
    return start


def rebuild(old: Trainer, plan: Plan, done: int, reporter: Reporter, file_group: Any) -> Trainer:
    """The same run under another plan of the same ranks, from the checkpoint that was begun after `done` steps.

    The old models, their groups and their memory go first: there need not be room for both.
    """
    assert old.saving is not None
    old.saving.finish()
    path, copier = writer.path_of(Path(old.job.checkpoints), done), old.saving.copier
    _let_go(old)
    job = replace(old.job, plan=plan, resume=str(path))
    new = build(job, old.device, training=old.batches.training, validation=old.batches.validation)
    resume(new, path, file_group)
    new.history, new.requests = old.history, old.requests
    save_with(new, reporter, file_group, beyond=done, copier=copier)
    return new


def _let_go(old: Trainer) -> None:
    old.batches.close()
    old.gradients.arrive()  # weights may still be on their way for a forward that will not come
    synchronize(old.device)
    old.gradients.close()
    old.groups.destroy()
    del old.saving, old.models, old.pipeline, old.gradients, old.optimizer
    gc.collect()
    if has_streams(old.device):
        module_of(old.device).empty_cache()
