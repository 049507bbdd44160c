"""What parity tests run on each rank, the single-process reference they compare with, and bugs to plant."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hetctl.comm.operation.device import rank_device
from hetctl.trainer import schedule
from hetctl.trainer.bench import samples
from hetctl.trainer.data.datasets import Conversations, Dataset
from hetctl.trainer.data.tokens import BEARS_LOSS
from hetctl.trainer.gradients import buckets, gradients, layout
from hetctl.trainer.gradients.layout import Slot
from hetctl.trainer.gradients.optimizer import learning_rate
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from hetctl.trainer.loop.trainer import Trainer
from hetctl.trainer.model import activations, model, preferences, split_backward, tensor_cuts
from hetctl.trainer.model.adapters import is_trained
from hetctl.trainer.model.block_formats import Quantised
from hetctl.trainer.model.dropout import draws_of
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.initial_weights import start_of, value_of
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.quantised import quantise
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.pipeline import boundary, pipeline
from hetctl.trainer.recipe import (
    BatchSection,
    DataSection,
    DpoSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    TrainSection,
)
from tests.layouts import Layout, plan_of

SEQ_LEN, STEPS = 12, 20
SHAPE = ModelShape("tiny", "llama", layers=4, hidden=16, heads=4, kv_heads=2, intermediate=24, vocab=48)


@dataclass(frozen=True)
class Trace:
    """A run, step by step: loss, gradient norm, and every parameter after the step."""

    losses: list[float]
    norms: list[float]
    parameters: list[dict[str, torch.Tensor]]
    slots: dict[str, Slot] = field(default_factory=dict)  # which part of a parameter is held, where it is not whole
    quantised: Quantised | None = None  # what its frozen weights are bytes of
    accuracies: list[float | None] = field(default_factory=list)  # of preference pairs
    margins: list[float | None] = field(default_factory=list)


def part_of(trace: Trace, steps: slice) -> Trace:
    """Some of its steps."""
    return Trace(trace.losses[steps], trace.norms[steps], trace.parameters[steps])


class UnevenSamples(samples.UnevenSamples):
    """Random tokens of these tests' shape."""

    def __init__(self, global_batch: int) -> None:
        super().__init__(SHAPE.vocab, SEQ_LEN)
        self.global_batch = global_batch


def samples_of(asked: Recipe) -> Dataset:
    """Uneven samples, or random conversations where they are packed or pairs."""
    packing, together = asked.data.packing, 1 if asked.dpo.beta is None else 2
    if not packing and together == 1:
        return UnevenSamples(asked.batch.global_batch)
    random = np.random.default_rng(1)
    lengths = random.integers(2, SEQ_LEN // (1 if together == 1 else 3) + 2, 300)
    tokens = random.integers(0, SHAPE.vocab, lengths.sum()).astype(np.uint32)
    ends = np.cumsum(lengths)
    said = random.random(len(tokens)) < 0.6
    said[ends - 1] = True  # each has a target
    about = {"seq_len": SEQ_LEN, "global_batch": asked.batch.global_batch, "seed": 0}
    about |= {"long": "cut", "packing": packing, "together": together}
    return Conversations(tokens | BEARS_LOSS * said.astype(np.uint32), ends, "random", **about)


def recipe(
    optimizer: str,
    *,
    clip_norm: float,
    global_batch: int,
    precision: str = "fp64",
    packing: bool = False,
    beta: float | None = None,
    **train: Any,
) -> Recipe:
    lr = 0.05 if optimizer == "sgd" else 3e-3
    section = OptimizerSection(name=optimizer, lr=lr, warmup_steps=3, clip_norm=clip_norm)  # type: ignore[arg-type]
    return Recipe(
        model=ModelSection("tiny", SEQ_LEN),
        data=DataSection(packing=packing),
        batch=BatchSection(global_batch),
        optimizer=section,
        dpo=DpoSection(beta),
        train=TrainSection(steps=STEPS, precision=precision, **train),  # type: ignore[arg-type]
    )


def train_layout(
    rank: int,
    layout: Layout,
    asked: Recipe,
    shape: ModelShape = SHAPE,
    plant: str = "",
    device: str = "cpu",
    transport: str = "tcp",
) -> Trace:
    """This rank's trace of a layout: its own parameters, and the figures all ranks share."""
    PLANTS[plant]()
    plan = plan_of(layout, seq_len=SEQ_LEN, transport=transport)
    plan.validate(where="test", layers=shape.layers)
    job = Job(plan, asked, shape, checkpoints="unused")
    trainer = build(job, _device(rank, device), training=samples_of(asked))
    slots = {slot.name: slot for bucket in trainer.gradients.every for slot in bucket.layout.slots}
    trace = Trace([], [], [], slots, shape.quantised)
    for step in range(STEPS):
        traced_step(trainer, step, trace)
    return trace


def traced_step(trainer: Trainer, step: int, trace: Trace) -> None:
    """One step, and what it came to."""
    figures = trainer.train_step(step)
    trainer.timeline.end_step()
    trainer.gradients.arrive()
    trace.losses.append(figures.loss)
    trace.norms.append(figures.grad_norm)
    trace.accuracies.append(figures.accuracy)
    trace.margins.append(figures.margin)
    trace.parameters.append({n: m.detach().cpu().clone() for n, m in trainer.gradients.parameters.items()})


def _device(rank: int, kind: str) -> torch.device:
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # islands share GPUs where there are fewer than ranks
        return torch.device(kind, torch.cuda.current_device())
    return rank_device()


def initialise(model: StageModel, seed: int) -> None:
    """Start weights, each from (seed, name) alone."""
    with torch.no_grad():
        for name, parameter in model.named().items():
            dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
            parameter.copy_(start_of(name, model.shape, None, seed=seed, dtype=dtype, device=parameter.device))


def dequantised(model: StageModel) -> StageModel:
    """The same model in fp64 with plain weights, which are what its bytes come to."""
    assert model.shape.adapters is not None
    adapters = replace(model.shape.adapters, quantised=None)
    plain = StageModel(replace(model.shape, adapters=adapters), (0, model.shape.layers)).double()
    held = model.named()
    with torch.no_grad():
        for name, parameter in plain.named().items():
            parameter.copy_(value_of(name, held[name], model.shape, parameter.dtype))
    return plain


def one_at_a_time(
    inputs: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each conversation of packed rows as a batch of its own."""
    found = []
    for row, target, marks in zip(inputs, targets, documents, strict=True):
        for number in range(1, int(marks.max()) + 1):
            found.append((row[marks == number][None], target[marks == number][None]))
    assert len(found) > len(inputs), "some share a row"
    return found


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all valid targets (not IGNORED), in at least fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def reference(asked: Recipe, shape: ModelShape = SHAPE) -> Trace:
    """The same training by plain torch: one process, the whole batch at once, torch's own clipping."""
    model = StageModel(shape, (0, shape.layers))
    model.double()
    initialise(model, asked.train.seed)
    if shape.quantised:
        model = dequantised(model)
    section = asked.optimizer
    named = model.named()
    for name, parameter in named.items():
        parameter.requires_grad_(is_trained(name, shape.adapters))
    trained = [p for p in named.values() if p.requires_grad]
    decays = [p for p in trained if p.dim() >= 2]
    others = [p for p in trained if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if section.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    data = samples_of(asked)
    trace = Trace([], [], [])
    for step in range(STEPS):
        inputs, targets, *documents = (torch.as_tensor(a) for a in data.batch(step, 0, asked.batch.global_batch))
        pieces = one_at_a_time(inputs, targets, documents[0]) if documents else [(inputs, targets)]
        numbers = step * asked.batch.global_batch + torch.arange(len(inputs))
        draws = draws_of(numbers, asked.train.seed) if shape.adapters and shape.adapters.dropout else None
        loss = (
            torch.stack([summed_loss(model(i, draws=draws), t) for i, t in pieces]).sum() / (targets != IGNORED).sum()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None])
        for parameter in named.values():
            if section.clip_norm and parameter.grad is not None:
                parameter.grad.mul_(min(1.0, section.clip_norm / norm.item()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, section)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.norms.append(norm.item())
        trace.parameters.append({n: p.detach().clone() for n, p in named.items()})
    return trace


def difference(found: list[Trace], wanted: Trace) -> float:
    """The largest deviation of any rank from the reference: loss, norm, any parameter, at any step."""
    worst = 0.0
    held: set[str] = set()
    for trace in found:
        assert len(trace.losses) == len(wanted.losses)
        for step in range(len(wanted.losses)):
            worst = max(worst, abs(trace.losses[step] - wanted.losses[step]))
            worst = max(worst, abs(trace.norms[step] - wanted.norms[step]))
            for name, value in trace.parameters[step].items():
                held.add(name)
                expected = wanted.parameters[step][name]
                if trace.quantised and not value.is_floating_point():
                    expected = quantise(expected, trace.quantised)
                if name in trace.slots:
                    expected = trace.slots[name].held_of(expected)
                worst = max(worst, float((value.double() - expected.double()).abs().max()))
    assert held == set(wanted.parameters[0]), "some parameter is on no rank"
    return worst if math.isfinite(worst) else math.inf


def _mean_of_means() -> None:
    right = StageModel.loss

    def wrong(self: StageModel, x: torch.Tensor, targets: torch.Tensor, *more: Any, scale: float) -> Any:
        return right(self, x, targets, *more, scale=scale * targets.numel() / int((targets != IGNORED).sum()))

    StageModel.loss = wrong  # type: ignore[method-assign]


def _factor_two() -> None:
    right = pipeline.StagePipeline.train_step
    pipeline.StagePipeline.train_step = lambda self, batch, *, scale: right(self, batch, scale=2 * scale)  # type: ignore[method-assign]


def _dropped_replica() -> None:
    gradients.Gradients.synchronise = lambda self: None  # type: ignore[method-assign]


def _stale_activation() -> None:
    right, seen = boundary.Inbox.take, {}  # type: ignore[var-annotated]

    def wrong(self: Any) -> torch.Tensor:
        fresh = right(self)
        stale = seen.get(id(self), fresh)
        seen[id(self)] = fresh.detach().clone()
        return stale

    boundary.Inbox.take = wrong  # type: ignore[method-assign]


def _copies_count_twice() -> None:
    """Norms, which every rank of a tensor group holds, counted by each of them."""
    right = tensor_cuts.cut_of
    layout.cut_of = lambda *a, **k: replace(right(*a, **k), counts=True)  # type: ignore[attr-defined]


def _copies_not_summed() -> None:
    buckets.Bucket.sum_copies = lambda self, tensor: None  # type: ignore[method-assign]


def _lost_weight_gradient() -> None:
    """Of what a backward puts off, the first is made of nothing."""
    right = split_backward.WeightGradients.take

    def wrong(self: split_backward.WeightGradients) -> Any:
        return [(p, None if x is None else x * (k > 0), g) for k, (p, x, g) in enumerate(right(self))]

    split_backward.WeightGradients.take = wrong  # type: ignore[method-assign]


def _documents_unseen() -> None:
    """The last stage does not hear where conversations end."""
    right = StageModel.loss
    StageModel.loss = lambda self, x, t, *more, scale: right(self, x, t, scale=scale)  # type: ignore[method-assign]


def _positions_go_on() -> None:
    model.positions_in = lambda documents: torch.arange(documents.shape[1]).expand_as(documents)


def _reference_adapted() -> None:
    StageModel.without_adapters = lambda self: nullcontext()  # type: ignore[assignment,method-assign,return-value]


def _tokens_weigh_alike() -> None:
    """Rejected answers are taught as chosen ones are."""
    right = preferences.Preferences.weights
    preferences.Preferences.weights = lambda *a, **about: right(*a, **about).abs()  # type: ignore[method-assign]


def _small_buckets() -> None:
    """Not a bug: a bucket for each unit, as large models have them."""
    layout.BUCKET_ELEMENTS = 1


def _everything_leaves() -> None:
    """Not a bug: activations go to the host however small they are."""
    activations.LEAST_BYTES = 0


def _weights_one_behind(micro_batches: int, *, forwards_ahead: int, **_: Any) -> tuple[schedule.Action, ...]:
    return schedule.split_actions(micro_batches, forwards_ahead, put_off=1)


TOY_SCHEDULE = schedule.Schedule(
    "weights-one-behind",
    actions=_weights_one_behind,
    splits_backward=True,
    timed_by_search=False,
    reason="Every stage makes weight gradients one micro-batch late, as asked.",
)


def _toy_schedule() -> None:
    """Not a bug: a schedule that nobody has heard of is registered."""
    schedule.SCHEDULES[TOY_SCHEDULE.name] = TOY_SCHEDULE


PLANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "small buckets": _small_buckets,
    "everything leaves": _everything_leaves,
    "toy schedule": _toy_schedule,
    "mean of means": _mean_of_means,
    "factor two": _factor_two,
    "dropped replica": _dropped_replica,
    "stale activation": _stale_activation,
    "copies count twice": _copies_count_twice,
    "copies not summed": _copies_not_summed,
    "lost weight gradient": _lost_weight_gradient,
    "documents unseen": _documents_unseen,
    "positions go on": _positions_go_on,
    "reference adapted": _reference_adapted,
    "tokens weigh alike": _tokens_weigh_alike,
}
