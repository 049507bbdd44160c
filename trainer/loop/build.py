"""A rank's trainer from its job: groups, models, gradients, start weights, optimiser, pipeline, and its checkpoints.

It begins anew, goes on from a checkpoint, or goes on from one under another plan.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.events import Note, Reporter, Saved
from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.operation.device import has_streams, module_of, synchronize
from hetctl.trainer.checkpoint import per_host, writer
from hetctl.trainer.checkpoint.per_host import Copier, make_copier
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.checkpoint.writer import Checkpoints
from hetctl.trainer.data.batches import Batches
from hetctl.trainer.data.datasets import Dataset
from hetctl.trainer.gradients.buckets import Bucket
from hetctl.trainer.gradients.gradients import Gradients
from hetctl.trainer.gradients.layout import (
    KINDS,
    keeps_whole,
    layouts_of,
    may_share,
    shards_of,
    shards_over,
    tensor_share_of,
)
from hetctl.trainer.gradients.optimizer import build_optimizer
from hetctl.trainer.gradients.sharded_bucket import ShardedBucket
from hetctl.trainer.job import Job
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.model.activations import HostActivations
from hetctl.trainer.model.compilation import compile_model
from hetctl.trainer.model.compute_precision import compute_in
from hetctl.trainer.model.huggingface import WeightFiles
from hetctl.trainer.model.initial_weights import start_of
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.split_backward import WeightGradients
from hetctl.trainer.pipeline.pipeline import StagePipeline, sums_of
from hetctl.trainer.planning.executable import check_executable, check_trainable
from hetctl.trainer.planning.stages import share
from hetctl.trainer.ranks.groups import Place, ProcessGroups, create_groups
from hetctl.trainer.ranks.timeline import Timeline
from hetctl.trainer.schedule import SCHEDULES


def build(job: Job, device: torch.device, *, training: Dataset, validation: Dataset | None = None) -> Trainer:
    """This rank's trainer; the default process group exists. Raises ConfigError for plans it cannot execute."""
    plan, train = job.plan, job.recipe.train
    check_executable(plan, compiled=train.compile)
    check_trainable(job.shape, plan)
    torch.manual_seed(train.seed)
    groups = create_groups(plan, timeout=timedelta(seconds=job.timeout_s))
    place, timeline = Place.of(plan, dist.get_rank()), Timeline(device)
    seed = train.seed if job.shape.adapters and job.shape.adapters.dropout else None
    batches = Batches(
        plan, place, device, training=training, validation=validation, steps=train.steps, dropout_seed=seed
    )
    if place.idle:
        return _idle(job, device, place, timeline, batches, groups)
    stages = [plan.replicas[place.replica].stages[s] for s in place.stages]  # all that it holds a part of
    models = _models(job, place, groups, stages)
    gradients = _gradients(job, device, place, groups, models, timeline)
    _initialise(gradients, job, device)
    _offload_activations(models, stages, gradients, device)
    optimizer = build_optimizer((p for b in gradients.buckets for p in b.pieces), job.recipe.optimizer)
    for model in models if train.compile else ():
        samples = share(stages[0].micro_batch_size, stages[0].width)
        several = job.recipe.data.packing or job.recipe.dpo.beta is not None
        compile_model(model, samples=samples, seq_len=plan.seq_len, packing=several)
    deferred = _deferred(models, gradients) if SCHEDULES[plan.schedule].splits_backward else None
    pipeline = StagePipeline(
        plan, place, models, groups, timeline=timeline, deferred=deferred, beta=job.recipe.dpo.beta
    )
    return Trainer(job, device, place, models, pipeline, gradients, optimizer, timeline, batches, groups)


def _models(job: Job, place: Place, groups: ProcessGroups, stages: Sequence[Stage]) -> tuple[StageModel, ...]:
    """Without memory: the buckets have that."""
    tensor = tensor_share_of(job.plan, place, groups)
    with torch.device("meta"):
        return tuple(StageModel(job.shape, s.layers, recompute=s.recompute, tensor=tensor) for s in stages)


def _gradients(
    job: Job,
    device: torch.device,
    place: Place,
    groups: ProcessGroups,
    models: Sequence[StageModel],
    timeline: Timeline,
) -> Gradients:
    """All buckets: whole, or sharded where memory asks for that; state shared in the stage, or by all holders.

    What is frozen is no one's sum.
    """
    plan, train = job.plan, job.recipe.train
    dtype = compute_in(train.precision, device)
    every = trained, frozen, quantised = [layouts_of(models, plan, rank=place.rank, kind=of) for of in KINDS]
    own, others, packed = (sum(slot.numel for layout in kind for slot in layout.slots) for kind in every)
    weights, gradients = (own + others) * dtype.itemsize + packed, own * max(dtype.itemsize, 4)
    over_replicas = plan.over_replicas if train.sharded == "auto" else train.sharded == "replicas"
    whole = over_replicas or keeps_whole(plan, place, train.sharded, weights=weights, gradients=gradients)
    in_stage = shards_of(plan, place, groups)
    made = Bucket if whole or in_stage.count == 1 else ShardedBucket
    buckets = [
        made(
            layout,
            shards_over(layout, place.rank, groups) if over_replicas and may_share(plan, layout) else in_stage,
            dtype=dtype,
            device=device,
            group=groups.reduce_group(layout.holders) if len(layout.holders) > 1 else None,
            bridged=plan.crosses_islands(layout.holders),
            offload=plan.replicas[place.replica].stages[place.stage].offload,
        )
        for layout in trained
    ]
    buckets += [
        made(layout, in_stage, dtype=of, device=device, group=None, bridged=False, frozen=True)
        for layouts, of in ((frozen, dtype), (quantised, torch.uint8))
        for layout in layouts
    ]
    return Gradients(models, buckets, plan, place.rank, overlap=train.overlap, timeline=timeline)


def _initialise(gradients: Gradients, job: Job, device: torch.device) -> None:
    """The weights to start from: a folder's, or random ones that depend on (seed, name) alone.

    A checkpoint has what is trained, and nothing else.
    """
    files = WeightFiles(Path(job.weights), job.shape) if job.weights else None
    seed, dtype = job.recipe.train.seed, gradients.buckets[0].master_dtype
    for bucket in gradients.every if not job.resume else gradients.frozen:
        for name in (slot.name for slot in bucket.layout.slots):
            bucket.assign(name, start_of(name, job.shape, files, seed=seed, dtype=dtype, device=device))


def _offload_activations(
    models: Sequence[StageModel], stages: Sequence[Stage], gradients: Gradients, device: torch.device
) -> None:
    for model, stage in zip(models, stages, strict=True):
        if stage.offload_activations:
            model.host_activations = HostActivations(device, kept=[b.weights for b in gradients.every])


def _deferred(models: Sequence[StageModel], gradients: Gradients) -> WeightGradients:
    """What makes the weight gradients of a split backward when the schedule has time."""
    deferred = WeightGradients(gradients.accumulate)
    for model in models:
        model.defer_weight_gradients(deferred)
    return deferred


def _idle(
    job: Job, device: torch.device, place: Place, timeline: Timeline, batches: Batches, groups: ProcessGroups
) -> Trainer:
    """The trainer of a rank without a stage: it meets the others where all ranks meet, and computes nothing."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    pipeline: Any = IdlePipeline(sums_of(job.recipe.dpo.beta))
    gradients = Gradients((), (), job.plan, place.rank, timeline=timeline)
    return Trainer(job, device, place, (), pipeline, gradients, optimizer, timeline, batches, groups)


class IdlePipeline:
    """No stage: no loss, no tokens."""

    def __init__(self, sums: int) -> None:
        self.sums = sums

    def train_step(self, batch: Sequence[Any], *, scale: float) -> Tensor:
        return self.evaluate(batch)

    def evaluate(self, batch: Sequence[Any]) -> Tensor:
        return torch.zeros(self.sums, dtype=torch.float64)

    def refer(self, batch: Sequence[Any]) -> None:
        pass


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
        keep_best=recipe.keep_best,
        beyond=beyond,
        base=trainer.job.base,
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
    reader = Reader(here)
    reader.check_is_of(trainer.job.shape, whole=False, base=trainer.job.base)
    trainer.loss_scale = trainer.loss_scale and (reader.loss_scale or trainer.loss_scale)
    trainer.best = reader.best
    trainer.lately.extend(reader.lately)
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
    new.so_far, new.lately, new.requests = old.so_far, old.lately, old.requests
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
