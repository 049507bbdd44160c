"""A run that could start: recipe, cluster and plan, checked against each other, the data and the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetctl.comm.contract.cluster import Cluster, Member
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import HOST
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import show_bytes
from hetctl.console import Sink
from hetctl.launcher.engines.entrance import choose_way
from hetctl.launcher.supervisor.launch import Launch
from hetctl.runs.inputs import shipments
from hetctl.trainer.checkpoint.base import base_digest
from hetctl.trainer.data.megatron import is_megatron
from hetctl.trainer.model.config import find_weights, model_folder, refuse_unread_weights
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.planning.executable import check_executable, check_trainable, check_wishes
from hetctl.trainer.planning.planner import weigh
from hetctl.trainer.planning.precision import settled
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.recipe import TOKENIZER, Recipe


@dataclass(frozen=True)
class Prepared:
    """Everything decided, nothing written. It travels as JSON to where the run goes on (`handover.py`)."""

    recipe: Recipe
    cluster: Cluster
    plan: Plan
    way: str = "ssh"  # how hosts are entered
    fixed: bool = False  # the plan is a person's, which says who takes part
    speeds: Mapping[str, float] = field(default_factory=dict)  # what it was planned from
    profile: Profile | None = None
    predicted: PredictedStep | None = None  # what the report shows beside what was measured

    @cached_property
    def shape(self) -> ModelShape:
        return self.recipe.shape()

    @cached_property
    def base(self) -> str | None:
        """What its adapters are adapters of."""
        return base_digest(self.shape, find_weights(self.recipe.model.name), seed=self.recipe.train.seed)

    @cached_property
    def launch(self) -> Launch:
        return Launch.of(self.cluster, self.plan, way=self.way, verify_bridge=self.recipe.bridge.verify)

    @cached_property
    def shares_cores(self) -> bool:
        """Whether the ranks are processes on this machine's CPUs whose speeds nobody measured: what is predicted of
        them, and how they compare, then says nothing."""
        return self.launch.here and self.launch.device_type == HOST and self.profile is None

    def kept_in(self, store: str) -> Prepared:
        """The same run with its checkpoints kept otherwise (`checkpoint.store`)."""
        return replace(self, recipe=replace(self.recipe, checkpoint=replace(self.recipe.checkpoint, store=store)))

    def planned_on(self, cluster: Cluster) -> Prepared:
        """The same run on another cluster, planned anew. Raises Infeasible."""
        made = weigh(cluster, self.recipe, speeds=self.speeds, profile=self.profile)
        return replace(self, cluster=cluster, plan=made.plan, predicted=PredictedStep.of(made))


def prepare(
    recipe: Recipe,
    cluster: Cluster,
    *,
    plan: Plan | None = None,
    speeds: Mapping[str, float],
    profile: Profile | None = None,
    way: str = "auto",
    sink: Sink,
) -> Prepared:
    """Make or check the plan, check data and weights. Raises ConfigError or Infeasible; writes nothing."""
    shape = recipe.shape()
    check_trainable(shape)
    asked, recipe = recipe, settled(recipe, cluster)
    way = choose_way(way, cluster)
    if plan is not None:
        prepared = Prepared(recipe, cluster, _checked_plan(plan, cluster, recipe, sink), way, fixed=True)
    else:
        made = weigh(cluster, asked, speeds=speeds, profile=profile)  # says what was left to us
        step = PredictedStep.of(made)
        prepared = Prepared(recipe, cluster, made.plan, way, speeds=speeds, profile=profile, predicted=step)
    _say_data(recipe, sink)
    if not prepared.launch.here:
        for one in shipments(recipe):
            sink.say(f"data.ship: {one.path} ({show_bytes(one.bytes)}) goes to hosts that do not have it")
    if prepared.launch.here:
        _check_data(recipe)
    _check_start(recipe, shape, sink)
    return prepared


def _checked_plan(plan: Plan, cluster: Cluster, recipe: Recipe, sink: Sink) -> Plan:
    """A person's plan file, if this cluster and recipe can run it. Raises ConfigError."""
    if plan.seq_len != recipe.model.seq_len or plan.global_batch != recipe.batch.global_batch:
        raise ConfigError(
            f"the plan is for {plan.global_batch} samples of {plan.seq_len} tokens, the recipe asks for "
            f"{recipe.batch.global_batch} of {recipe.model.seq_len}",
            hint="make the plan anew, or set batch.global_batch and model.seq_len to the plan's",
        )
    check_executable(plan, compiled=recipe.train.compile)
    check_trainable(recipe.shape(), plan)
    check_wishes(plan, recipe)
    if plan.cluster_digest != cluster.digest:
        sink.warn("the plan was made for another cluster (its digest differs); its ranks fit, so it is used")
        return _held_to(plan, cluster, sink)
    return plan


def _held_to(plan: Plan, cluster: Cluster, sink: Sink) -> Plan:
    """The plan, each rank held to the memory of its device here, which may be a share of one."""
    seats = Launch.of(cluster, plan).seats
    rooms = {s.rank: cluster.device(Member(s.host, s.device)).room_bytes for s in seats}
    for rank, needed in enumerate(plan.predicted.memory_bytes if plan.predicted else ()):
        room = rooms.get(rank)
        if room is not None and needed > room:
            sink.warn(f"rank {rank} is predicted to need {show_bytes(needed)}, its device here has {show_bytes(room)}")
    caps = {r.rank: min(filter(None, (r.memory_bytes, rooms.get(r.rank))), default=None) for r in plan.ranks}
    return replace(plan, ranks=tuple(replace(r, memory_bytes=caps[r.rank]) for r in plan.ranks))


def _say_data(recipe: Recipe, sink: Sink) -> None:
    """What is trained on, and through which tokenizer, which nobody may have named."""
    data, folder = recipe.data, model_folder(recipe.model.name)
    lacking = data.tokenizer == "bytes" and folder is not None and not (folder / TOKENIZER).is_file()
    why = f" ({folder} has no {TOKENIZER})" if lacking else ""
    for one in data.each:
        made = "tokens already" if is_megatron(one.source) else f"tokenizer {data.tokenizer}{why}"
        sink.say(f"data: {one.source}, {made}")


def _check_data(recipe: Recipe) -> None:
    """Raise ConfigError unless the data is there, can be tokenised, and fits the model."""
    from hetctl.trainer.data.datasets import open_sides  # torch, which not every start needs
    from hetctl.trainer.data.sources import check_pairs

    check_pairs(recipe.data, wanted=recipe.dpo.beta is not None)
    seq_len, global_batch = recipe.model.seq_len, recipe.batch.global_batch
    open_sides(recipe.data, seq_len=seq_len, global_batch=global_batch, vocabulary=recipe.shape().vocab)


def _check_start(recipe: Recipe, shape: ModelShape, sink: Sink) -> None:
    """Say what weights a model folder gives to start from. Raises ConfigError where they cannot be used."""
    refuse_unread_weights(recipe.model.name)
    if weights := find_weights(recipe.model.name):
        from hetctl.trainer.model.huggingface import check_weights  # torch, which not every start needs

        check_weights(weights, shape)
        sink.say(f"{'adapters of' if shape.adapters else 'fine-tuning'} the weights in {weights}")
    elif shape.adapters:
        sink.warn(f"lora adapts random weights: {recipe.model.name} names no folder with weights")
    elif folder := model_folder(recipe.model.name):
        sink.warn(f"no weights in {folder}: they start random")
