"""One rank's trainer: the state of its share of a run under one plan, and what a step does to it."""

from __future__ import annotations

import math
import signal
from collections import deque
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.events import Step
from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import module_of
from hetctl.trainer.checkpoint.best import NONE_YET, BestSoFar
from hetctl.trainer.checkpoint.writer import Checkpoints
from hetctl.trainer.data.batches import Batches, MicroBatch
from hetctl.trainer.gradients.gradients import Gradients
from hetctl.trainer.gradients.loss_scale import first_scale
from hetctl.trainer.gradients.optimizer import clip_factor, learning_rate, scale_within, set_learning_rate
from hetctl.trainer.job import Job
from hetctl.trainer.loop.figures import IslandFigures, Means, SoFar, StepFigures
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.pipeline.pipeline import StagePipeline
from hetctl.trainer.ranks.groups import Place, ProcessGroups
from hetctl.trainer.ranks.timeline import Timeline


@dataclass
class SignalRequests:
    """What signals have asked this rank for, and what all ranks have agreed on at the end of the latest step."""

    stop: bool = False
    saves: int = 0
    saves_agreed: int = 0  # by all ranks: one that hears a signal a step late asks for no second one
    stopping: bool = False  # agreed by all ranks
    save_now: bool = False  # agreed by all ranks

    def listen(self) -> None:
        """TERM and USR2: finish the step, save, end. USR1: save and go on."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "saves", self.saves + 1))

    def addends(self) -> tuple[Tensor, Tensor]:
        """What this rank adds to how many ranks ask for a stop, and for a save."""
        return _flag(self.stop), _flag(self.saves > self.saves_agreed)

    def agree(self, *, stops: float, saves: float) -> None:
        """So many ranks have asked: any is enough."""
        self.stopping, self.save_now = stops > 0, saves > 0
        self.saves_agreed += self.save_now


LATELY = 256  # steps whose figures a checkpoint keeps: more than the pipe holds to an agent that reads no more


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
    batches: Batches
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    saving: Checkpoints | None = None
    updates: int = 0  # of the optimiser; fewer than steps where some were skipped
    best: BestSoFar = NONE_YET  # equal on all ranks: validation losses are sums over them
    requests: SignalRequests = field(default_factory=SignalRequests)
    so_far: SoFar = field(default_factory=SoFar)
    lately: deque[Step] = field(default_factory=lambda: deque(maxlen=LATELY))
    validated: Means | None = None  # what the latest validation came to

    def __post_init__(self) -> None:
        plan = self.job.plan
        self.bridged = plan.crosses_islands(range(plan.world_size))
        self.loss_scale = first_scale(self.job.recipe.train)  # equal on all ranks; None: not fp16
        # of a sample, up to a power of two: gradients are scaled by its inverse, which every precision holds exactly
        self.nominal_tokens = 1 << (plan.seq_len - 1).bit_length()
        self.islands = IslandFigures(plan, self.place.rank, self.device)

    def train_step(self, step: int) -> StepFigures:
        """One optimiser step over the global batch. Raises WorkFailed when the loss is not finite."""
        self.timeline.begin_step()
        batch = self._referred(self.batches.of_training(step))
        self.gradients.begin_step(len(batch))
        sums = self.pipeline.train_step(batch, scale=1.0 / self._unscaling)
        self.gradients.synchronise()
        figures = self._agree_on_step(step, sums)
        self.so_far.add(figures)
        return figures

    def validate(self) -> float | None:
        """Mean loss over the held-out samples the recipe asks for, rounded up to whole global batches."""
        if self.batches.validation is None:
            return None
        steps = math.ceil(self.job.recipe.train.validation_samples / self.job.plan.global_batch)
        sums = torch.zeros((), dtype=torch.float64)
        for step in range(steps):
            self.timeline.begin_step()
            sums = sums + self.pipeline.evaluate(self._referred(self.batches.of_validation(step)))
        self.validated = Means.of(self._sum_over_ranks(sums))
        return self.validated.loss if self.validated else None

    def _referred(self, batch: list[MicroBatch]) -> list[MicroBatch]:
        """The batch, preference pairs with their reference."""
        if self.job.recipe.dpo.beta is not None:
            self.pipeline.refer(batch)
        return batch

    def save(self, done: int) -> None:
        """Begin saving the state after `done` steps; it is committed while later steps run, or at the end."""
        if self.saving is not None:
            self.saving.begin(
                done, updates=self.updates, loss_scale=self.loss_scale, best=self.best, lately=self.lately
            )

    def follow(self, plan: Plan) -> None:
        """From the next step on take other accumulation counts; all ranks do so after the same step."""
        self.job = replace(self.job, plan=plan)
        self.batches.follow(plan)

    def _agree_on_step(self, step: int, sums: Tensor) -> StepFigures:
        """The step's one point where everybody meets: figures, updates and what was asked for follow from sums."""
        written = self.saving is not None and self.saving.written
        squares, stops, saves, all_written, *rest = self._sum_over_ranks(
            self.gradients.squared_norm(),
            *self.requests.addends(),
            _flag(written),
            sums,
            self.islands.addend(self.timeline.known),
        )
        means, self.islands.sums = Means.of(rest[: len(sums)]), rest[len(sums) :]
        if means is None:
            raise WorkFailed(f"step {step + 1} has no valid token", hint="look at the data: every target is ignored")
        norm = math.sqrt(squares) * self._unscaling / means.terms if math.isfinite(squares) else math.nan
        lr = learning_rate(step, self.job.recipe.train.steps, self.job.recipe.optimizer)
        scale = self.loss_scale.value if self.loss_scale else None
        figures = StepFigures(**asdict(means), grad_norm=norm, lr=lr, loss_scale=scale)
        with self.timeline.span("update"):
            self._update_if_finite(step, figures)
        self.requests.agree(stops=stops, saves=saves)
        if self.saving is not None:
            self.saving.met()
            if all_written == dist.get_world_size():
                self.saving.commit()
        return figures

    def _update_if_finite(self, step: int, figures: StepFigures) -> None:
        recipe = self.job.recipe
        if figures.finite:
            clipped = clip_factor(figures.grad_norm, recipe.optimizer.clip_norm)
            self._update(figures.lr, self._unscaling / figures.terms * clipped)
        elif not figures.overflowed and recipe.train.on_nonfinite == "stop":
            raise WorkFailed(
                f"the loss or its gradient is not finite at step {step + 1}",
                hint="lower optimizer.lr, or set train.on_nonfinite=skip",
            )
        if self.loss_scale and math.isfinite(figures.loss):
            self.loss_scale = self.loss_scale.after(step, finite=figures.finite)

    @property
    def _unscaling(self) -> float:
        """What the gradients' sums are to be multiplied with before they are divided by the step's tokens."""
        return self.nominal_tokens / (self.loss_scale.value if self.loss_scale else 1.0)

    def _update(self, lr: float, factor: float) -> None:
        if not scale_within(self.optimizer, factor):
            self.gradients.scale_(factor)
        self.gradients.prepare_update()
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.updates += 1
        self.gradients.publish()

    def _sum_over_ranks(self, *values: Tensor) -> list[float]:
        """Sums over all ranks, in fp64, read on the host; a device's clock is tied to the host's there."""
        vector = torch.cat([v.reshape(-1).to(self.device, torch.float64, non_blocking=True) for v in values])
        others = tuple(r for r in range(dist.get_world_size()) if r != self.place.rank)
        with self.timeline.span("world", peers=others, bridged=self.bridged):
            dist.all_reduce(vector)
        reached = self.timeline.mark()
        found = _on_host(vector)
        self.timeline.anchor(reached)
        return found


def _on_host(vector: Tensor) -> list[float]:
    """The values, through pinned memory.

    A copy to pageable memory holds a lock of the driver until it has run, and a peer copy of the bridge waits for that
    lock: for ever, where this vector is a native sum that waits for the peer.
    """
    host = torch.empty_like(vector, device="cpu", pin_memory=not vector.is_cpu)
    host.copy_(vector, non_blocking=True)
    if not vector.is_cpu:
        module_of(vector.device).current_stream(vector.device).synchronize()
    found: list[float] = host.tolist()
    return found


def _flag(value: bool) -> Tensor:
    return torch.as_tensor(float(value))
