"""The training loop of one rank: steps, validation, checkpoints, and the figures everybody agrees on."""

from __future__ import annotations

import gc
import math
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.contract.rank_events import Reporter
from hetctl.trainer.checkpoint import per_host, writer
from hetctl.trainer.checkpoint.file_wait import patient_group
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.checkpoint.shard_copies import Copier, make_copier
from hetctl.trainer.checkpoint.writer import Checkpoints
from hetctl.trainer.data.prefetch import Prefetch
from hetctl.trainer.data.samples import Dataset, PackedTokens
from hetctl.trainer.data.tokens import open_tokens
from hetctl.trainer.gradients.gradients import Gradients, tensor_share_of
from hetctl.trainer.gradients.optimizer import (
    build_optimizer,
    clip_factor,
    learning_rate,
    scale_within,
    set_learning_rate,
)
from hetctl.trainer.gradients.sharded_bucket import keeps_whole
from hetctl.trainer.job import Job
from hetctl.trainer.loop.idle import IdleGradients, IdlePipeline, is_idle
from hetctl.trainer.loop.profiling import profiled
from hetctl.trainer.loop.summary import summarise
from hetctl.trainer.loop.watch import Seen, Watch
from hetctl.trainer.model.activations import HostActivations
from hetctl.trainer.model.compilation import compile_model
from hetctl.trainer.model.huggingface import WeightFiles
from hetctl.trainer.model.model import StageModel, initial, parameters_of
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.model.split_backward import WeightGradients
from hetctl.trainer.pipeline.pipeline import MicroBatch, StagePipeline
from hetctl.trainer.pipeline.schedule import SPLIT
from hetctl.trainer.planning.executable import check_executable, check_trainable
from hetctl.trainer.ranks.groups import ProcessGroups, create_groups
from hetctl.trainer.ranks.place import Place
from hetctl.trainer.ranks.timeline import Timeline

SKIPS_SAID = 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class StepFigures:
    """What a step came to, equal on all ranks."""

    loss: float  # mean over all valid tokens
    tokens: int
    grad_norm: float  # before clipping
    lr: float

    @property
    def finite(self) -> bool:
        """Whether the weights were updated: others are skipped, where they do not stop the run."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class StopRequests:
    """What signals have asked this rank for."""

    stop: bool = False
    saves: int = 0


@dataclass
class Trainer:
    """One rank's share of a run under one plan: built once, then stepped."""

    job: Job
    device: torch.device
    place: Place
    models: tuple[StageModel, ...]  # one for each stage it holds
    pipeline: StagePipeline
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    timeline: Timeline
    training: Dataset
    validation: Dataset | None
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    saving: Checkpoints | None = None
    updates: int = 0  # of the optimiser; fewer than steps where some were skipped
    asked: StopRequests = field(default_factory=StopRequests)
    saves_agreed: int = 0  # by all ranks: one that hears a signal a step late asks for no second one
    stopping: bool = False  # agreed by all ranks
    save_now: bool = False  # agreed by all ranks
    history: list[StepFigures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bridged = self.job.plan.crosses_islands(range(self.job.plan.world_size))
        self.seen = Seen(self.job.plan, self.place.rank, self.device)
        self.batches = Prefetch(self._host_batch, steps=self.job.recipe.train.steps, begin=self._choose_device)

    def train_step(self, step: int) -> StepFigures:
        """One optimiser step over the global batch. Raises WorkFailed when the loss is not finite."""
        recipe = self.job.recipe
        nominal = self.job.plan.global_batch * self.job.plan.seq_len
        self.timeline.begin_step()
        batch = [self._to_device(m) for m in self.batches.get(step)]
        self.gradients.begin_step(len(batch))
        loss_sum, tokens = self.pipeline.train_step(batch, scale=1.0 / nominal)
        self.gradients.synchronise()
        written = self.saving is not None and self.saving.written
        asked = [_flag(self.asked.stop), _flag(self.asked.saves > self.saves_agreed)]
        looked = self.seen.part(self.timeline.known)
        loss_total, token_total, squares, stop, save, all_written, *self.seen.sums = self._agree(
            loss_sum, tokens, self.gradients.squared_norm(), *asked, _flag(written), looked
        )
        if token_total == 0:
            raise WorkFailed(f"step {step + 1} has no valid token", hint="look at the data: every target is ignored")
        norm = math.sqrt(squares) * nominal / token_total if math.isfinite(squares) else math.nan
        lr = learning_rate(step, recipe.train.steps, recipe.optimizer)
        with self.timeline.span("update"):
            if math.isfinite(loss_total) and math.isfinite(norm):
                self._update(lr, nominal / token_total * clip_factor(norm, recipe.optimizer.clip_norm))
            elif recipe.train.on_nonfinite == "stop":
                raise WorkFailed(
                    f"the loss or its gradient is not finite at step {step + 1}",
                    hint="lower optimizer.lr, or set train.on_nonfinite=skip",
                )
        self.stopping, self.save_now = stop > 0, save > 0
        self.saves_agreed += self.save_now
        if self.saving is not None and all_written == dist.get_world_size():
            self.saving.commit()
        figures = StepFigures(loss_total / token_total, int(token_total), norm, lr)
        self.history.append(figures)
        return figures

    def validate(self) -> float | None:
        """Mean loss over the held-out samples the recipe asks for, rounded up to whole global batches."""
        if self.validation is None:
            return None
        steps = math.ceil(self.job.recipe.train.validation_samples / self.job.plan.global_batch)
        loss_sum = tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        for step in range(steps):
            self.timeline.begin_step()
            batch = [self._to_device(m) for m in self._cut(self.validation, step)]
            more, count = self.pipeline.evaluate(batch)
            loss_sum, tokens = loss_sum + more, tokens + count
        loss_total, token_total = self._agree(loss_sum, tokens)
        return loss_total / token_total if token_total else None

    def save(self, done: int) -> None:
        """Begin saving the state after `done` steps; it is committed while later steps run, or at the end."""
        if self.saving is not None:
            self.saving.begin(done, updates=self.updates)

    def follow(self, plan: Plan) -> None:
        """From the next step on take other accumulation counts; all ranks do so after the same step."""
        self.job = replace(self.job, plan=plan)
        self.batches.forget()

    def _update(self, lr: float, factor: float) -> None:
        if not scale_within(self.optimizer, factor):
            self.gradients.scale_(factor)
        self.gradients.prepare_update()
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.updates += 1
        self.gradients.publish()

    def _agree(self, *values: torch.Tensor) -> list[float]:
        """Sums over all ranks, in fp64, read on the host: the step's one point where everybody meets."""
        vector = torch.cat([v.reshape(-1).to(self.device, torch.float64, non_blocking=True) for v in values])
        others = tuple(r for r in range(dist.get_world_size()) if r != self.place.rank)
        with self.timeline.span("world", peers=others, bridged=self.bridged):
            dist.all_reduce(vector)
        reached = self.timeline.mark()
        found = _read(vector)
        self.timeline.anchor(reached)
        return found

    def _choose_device(self) -> None:
        """Pinning in a thread that has chosen none would make a context on the first device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _host_batch(self, step: int) -> list[MicroBatch]:
        return self._cut(self.training, step)

    def _cut(self, dataset: Dataset, step: int) -> list[MicroBatch]:
        """This rank's samples of a step: its replica's share, cut into micro-batches, cut by width."""
        plan, place = self.job.plan, self.place
        if is_idle(plan, place.rank):
            return []
        stage = plan.replicas[place.replica].stages[place.stage]
        offset = sum(r.samples for r in plan.replicas[: place.replica])
        low, high = share(stage.micro_batch_size, stage.width, place.part)
        batch = []
        for k in range(stage.micro_batches):
            start = offset + k * stage.micro_batch_size
            inputs, targets = dataset.batch(step, start + low, start + high)
            batch.append(MicroBatch(self._pinned(inputs), self._pinned(targets)))
        return batch

    def _pinned(self, array: Any) -> torch.Tensor:
        tensor = torch.as_tensor(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _to_device(self, host: MicroBatch) -> MicroBatch:
        if self.device.type != "cuda":
            return host
        inputs, targets = (t.to(self.device, non_blocking=True) for t in (host.inputs, host.targets))
        return MicroBatch(inputs, targets)


def build(job: Job, device: torch.device, *, training: Dataset, validation: Dataset | None = None) -> Trainer:
    """This rank's trainer; the default process group exists. Raises ConfigError for plans it cannot execute."""
    plan, rank = job.plan, dist.get_rank()
    check_executable(plan, compiled=job.recipe.train.compile)
    check_trainable(job.shape, plan)
    torch.manual_seed(job.recipe.train.seed)
    groups = create_groups(plan, timeout=timedelta(seconds=job.timeout_s))
    place = Place.of(plan, rank)
    if is_idle(plan, rank):
        return _idle(job, device, place, training=training, validation=validation, groups=groups)
    stage = plan.replicas[place.replica].stages[place.stage]
    tensor = tensor_share_of(plan, place, groups)
    held = [plan.replicas[place.replica].stages[s] for s in place.stages]
    with torch.device("meta"):
        models = tuple(StageModel(job.shape, s.layers, recompute=s.recompute, tensor=tensor) for s in held)
    dtype, sharded = compute_dtype(job.recipe.train.precision, device), job.recipe.train.sharded
    timeline = Timeline(device)
    over = plan.over_replicas if sharded == "auto" else sharded == "replicas"
    gradients = Gradients(
        models,
        plan,
        place,
        groups,
        dtype=dtype,
        device=device,
        overlap=job.recipe.train.overlap,
        whole=over or keeps_whole(plan, place, sharded, parameters=sum(map(parameters_of, models)), dtype=dtype),
        over_replicas=over,
        timeline=timeline,
    )
    if not job.resume:
        _fill(gradients, job, device)
    for model, one in zip(models, held, strict=True):
        if one.offload_activations:
            model.host_activations = HostActivations(device, kept=[b.weights for b in gradients.buckets])
    optimizer = build_optimizer((p for b in gradients.buckets for p in b.pieces), job.recipe.optimizer)
    for model in models if job.recipe.train.compile else ():
        compile_model(model, samples=_largest_share(stage), seq_len=plan.seq_len)
    later = None
    if plan.schedule == SPLIT:
        later = WeightGradients(gradients.accumulate)
        for model in models:
            model.put_off(later)
    pipeline = StagePipeline(plan, place, models, groups, timeline=timeline, later=later)
    return Trainer(job, device, place, models, pipeline, gradients, optimizer, timeline, training, validation, groups)


def _idle(job: Job, device: torch.device, place: Place, **more: Any) -> Trainer:
    """The trainer of a rank without a stage."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    pipeline: Any = IdlePipeline()
    gradients: Any = IdleGradients()
    return Trainer(job, device, place, (), pipeline, gradients, optimizer, Timeline(device), **more)


def _fill(gradients: Gradients, job: Job, device: torch.device) -> None:
    """The weights to start from: a folder's, or random ones that depend on (seed, name) alone."""
    files = WeightFiles(Path(job.weights)) if job.weights else None
    seed, wide = job.recipe.train.seed, gradients.buckets[0].wide
    for name, size in gradients.whole_shapes().items():
        if files is not None:
            gradients.assign(name, files.read(name, size))
        else:
            gradients.assign(name, initial(name, size, job.shape, seed=seed, dtype=wide, device=device))


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What the model computes in; masters and gradients stay in fp32 (fp64 under fp64)."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return DTYPES[precision]


def run(job: Job, device: torch.device, reporter: Reporter) -> None:
    """Train from the first step (or the checkpoint's) to the last, or until asked to stop; then validate and save."""
    patient = patient_group()
    text, datasets = _datasets(job, patient)
    trainer = build(job, device, **datasets)
    start = _resume(trainer, Path(job.resume), patient) if job.resume else 0
    every, last = job.recipe.checkpoint.every, job.recipe.checkpoint.last
    goes_on = job.resume is not None and Path(job.resume).parent == Path(job.checkpoints)
    _save_with(trainer, reporter, patient, beyond=start if goes_on else 0)
    _listen(trainer.asked)
    reporter.emit("begin", step=start, steps=job.recipe.train.steps, text=text)
    watch = Watch(trainer, reporter, adapt=job.recipe.train.adapt)
    skipped, validations = 0, list[dict[str, Any]]()
    often = job.recipe.train.validate_every
    done, saved, began, validating = start, start if goes_on else -1, time.monotonic(), 0.0
    for step in range(start, job.recipe.train.steps):
        at = time.monotonic()
        with profiled(job, step, device, trainer.timeline):
            figures = trainer.train_step(step)
            trainer.timeline.end_step()
        seconds = time.monotonic() - at
        record = asdict(figures) | {"step_time_s": seconds, "tokens_per_s": figures.tokens / seconds}
        reporter.emit("step", step=step + 1, **record, **trainer.seen.told())
        if not figures.finite:
            skipped += 1
            if skipped <= SKIPS_SAID:
                rest = "; further ones are only counted" if skipped == SKIPS_SAID else ""
                sentence = f"step {step + 1} changed nothing: its loss or gradient is not finite{rest}"
                reporter.emit("note", sentence=sentence)
        done = step + 1
        watch.after(done)
        if trainer.stopping:
            break
        if trainer.save_now or (every and done % every == 0):
            trainer.save(done)
            saved = done
            if done < job.recipe.train.steps and (better := watch.cut_anew(done)):
                trainer = _anew(trainer, better, done, reporter, patient)
                watch.goes_on_with(trainer)
        if often and done % often == 0 and done < job.recipe.train.steps:
            at = time.monotonic()
            validations.append({"step": done, "validation_loss": trainer.validate()})
            validating += time.monotonic() - at
            reporter.emit("validated", **validations[-1])
    seconds = time.monotonic() - began - validating
    interrupted = trainer.stopping and done < job.recipe.train.steps
    validation = None if interrupted else trainer.validate()
    if (last or interrupted) and saved != done:
        trainer.save(done)
    if trainer.saving is not None:
        trainer.saving.finish()
    trainer.batches.close()
    watch.look(done, last=True)
    end = {
        "steps": done,
        "interrupted": interrupted,
        "validation_loss": validation,
        "validations": validations,
        "skipped_steps": skipped,
        "train_s": seconds,
    }
    summarise(trainer, reporter, end | watch.findings)


def _save_with(
    trainer: Trainer, reporter: Reporter, patient: Any, *, beyond: int, copier: Copier | None = None
) -> None:
    """Give a trainer its checkpoints; those of later steps than `beyond` are put aside."""
    plan, recipe = trainer.job.plan, trainer.job.recipe.checkpoint
    trainer.saving = Checkpoints(
        Path(trainer.job.checkpoints),
        trainer.gradients,
        trainer.optimizer,
        keep=recipe.keep,
        beyond=beyond,
        patient=patient,
        copier=copier or make_copier([r.host for r in plan.ranks], recipe.store),
    )
    trainer.saving.on_commit = lambda step: reporter.emit("saved", step=step)
    if trainer.saving.superseded is not None:
        moved = f"checkpoints of steps that this run makes anew are kept in {trainer.saving.superseded}"
        reporter.emit("note", sentence=moved)


def _anew(old: Trainer, plan: Plan, done: int, reporter: Reporter, patient: Any) -> Trainer:
    """The same run under another plan of the same ranks, from the checkpoint that was begun after `done` steps.

    The old models, their groups and their memory go first: there need not be room for both.
    """
    assert old.saving is not None
    old.saving.finish()
    old.batches.close()
    old.gradients.arrive()  # weights may still be on their way for a forward that will not come
    if old.device.type == "cuda":
        torch.cuda.synchronize()
    old.gradients.close()
    path, copier = writer.path_of(Path(old.job.checkpoints), done), old.saving.copier
    old.groups.destroy()
    del old.saving, old.models, old.pipeline, old.gradients, old.optimizer
    gc.collect()
    if old.device.type == "cuda":
        torch.cuda.empty_cache()
    job = replace(old.job, plan=plan, resume=str(path))
    new = build(job, old.device, training=old.training, validation=old.validation)
    _resume(new, path, patient)
    new.history, new.asked, new.saves_agreed = old.history, old.asked, old.saves_agreed
    _save_with(new, reporter, patient, beyond=done, copier=copier)
    return new


def _resume(trainer: Trainer, path: Path, patient: Any) -> int:
    """Load a checkpoint, fetching from other hosts what this one lacks. Returns the steps done."""
    needed = [slot.name for bucket in trainer.gradients.buckets for slot in bucket.layout.slots]
    here = per_host.gather(path, needed, group=patient)
    Reader(here).check_is_of(trainer.job.shape, whole=False)
    start, trainer.updates = writer.load(here, trainer.gradients, trainer.optimizer)
    per_host.release(here, group=patient)
    return start


def _listen(asked: StopRequests) -> None:
    """TERM and USR2: finish the step, save, end. USR1: save and go on. All ranks agree on it at the step's end."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: setattr(asked, "stop", True))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(asked, "saves", asked.saves + 1))


def _datasets(job: Job, patient: Any) -> tuple[str, dict[str, Any]]:
    """A digest of the text, equal on all ranks, and both sides of it."""
    tokens = open_tokens(job.recipe.data)
    highest, known = tokens.vocabulary - 1, job.shape.vocab - 1
    if highest > known:
        raise ConfigError(f"the data's tokens go up to {highest}, the model's vocabulary only to {known}")
    _agree_on_text(tokens.digest, patient)
    about = {"seq_len": job.plan.seq_len, "global_batch": job.plan.global_batch, "seed": job.recipe.data.seed}
    sides = {"training": PackedTokens(tokens.train, **about), "validation": PackedTokens(tokens.validation, **about)}
    return tokens.digest, sides


def _largest_share(stage: Stage) -> int:
    return -(-stage.micro_batch_size // stage.width)


def _read(vector: torch.Tensor) -> list[float]:
    """The values, on the host, through pinned memory.

    A copy to pageable memory holds a lock of the driver until it has run, and a peer copy of the bridge waits for that
    lock: for ever, where this vector is a native sum that waits for the peer.
    """
    host = torch.empty_like(vector, device="cpu", pin_memory=vector.is_cuda)
    host.copy_(vector, non_blocking=True)
    if vector.is_cuda:
        torch.cuda.current_stream(vector.device).synchronize()
    found: list[float] = host.tolist()
    return found


def _flag(value: bool) -> torch.Tensor:
    return torch.as_tensor(float(value))


def _agree_on_text(digest: str, patient: Any) -> None:
    """Raise ConfigError unless all ranks read the same tokens: hosts may hold different copies of the data."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, digest, group=patient)
    strange = [rank for rank, other in enumerate(everybody) if other != everybody[0]]
    if strange:
        raise ConfigError(
            f"ranks {', '.join(map(str, strange[:16]))} read other text than rank 0",
            hint="give all hosts the same data (python-stdlib differs between versions of Python)",
        )
