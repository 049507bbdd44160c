"""A layout that somebody else chose, as the candidate that it is, and what the cost model says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.trainer.planning.arrange import Batching, Pipeline
from hetctl.trainer.planning.costs import Mode, Recompute, usable_bytes
from hetctl.trainer.planning.groupings import slowest_sync
from hetctl.trainer.planning.pools import Pool
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.reschedule import dealt_out, with_times
from hetctl.trainer.planning.search import Candidate
from hetctl.trainer.planning.simulate import PipelineTimes, simulate
from hetctl.trainer.planning.space import PoolUse
from hetctl.trainer.planning.stages import MemoryChoice
from hetctl.trainer.schedule import SCHEDULES


@dataclass(frozen=True)
class StageLayout:
    """Layers on devices of one kind: `width` shares of each micro-batch, on `tensor` GPUs each."""

    pool: str  # a device class, where one island has it; otherwise ISLAND/CLASS
    layers: int
    width: int = 1
    tensor: int = 1
    shards: int = 1  # ranks that one copy of the stage's state, weights too, is spread over


@dataclass(frozen=True)
class ReplicaLayout:
    """One pipeline and its micro-batches: `micro_batch_size` samples at once on all the width of a stage."""

    stages: tuple[StageLayout, ...]
    micro_batch_size: int
    micro_batches: int
    forwards_ahead: tuple[int, ...] | None = None  # otherwise as the schedule has it


@dataclass(frozen=True)
class Layout:
    """A whole layout, in the words of plan.yaml."""

    replicas: tuple[ReplicaLayout, ...]
    schedule: str = "1f1b"
    chunks: int = 1  # stages per device: layers of a stage are shared out among them
    recompute: Recompute = "none"

    @property
    def samples(self) -> int:
        """The global batch."""
        return sum(r.micro_batch_size * r.micro_batches for r in self.replicas)

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        return sum(s.width * s.tensor for r in self.replicas for s in r.stages)


@dataclass(frozen=True)
class Engine:
    """What the program that ran a layout does otherwise than hetctl's trainer; each is documented behaviour."""

    blocking_transfers: bool = False  # a device sends and receives between computations, not beside them
    exposed_sums: bool = False  # gradient sums start after the last backward
    recomputes_all: bool = False  # full recomputation makes what backward does not ask for, too


OURS = Engine()  # hetctl's trainer


@dataclass(frozen=True)
class LayoutPrediction:
    """Seconds of a step, and bytes of the fullest device of each stage beside what a plan may count on there."""

    seconds: float
    memory_bytes: tuple[tuple[float, float], ...]

    @property
    def fits(self) -> bool:
        """Whether hetctl would have allowed it, by predicted memory."""
        return all(need <= usable for need, usable in self.memory_bytes)


def predict_layout(problem: Problem, layout: Layout, engine: Engine = OURS) -> LayoutPrediction:
    """What the cost model of the search says of a layout. Raises ConfigError for one that cannot be."""
    if engine.recomputes_all:
        problem = replace(problem, costs=replace(problem.costs, recomputes_all=True))
    candidate = candidate_of(problem, layout)
    times = [_under(engine, p) for p in candidate.pipelines]
    memory = ((s.costs.memory.at(s.layers), usable_bytes(s.use.pool.rates)) for _, _, s in candidate.stages)
    return LayoutPrediction(simulate(times).step_time_s, tuple(memory))


def candidate_of(problem: Problem, layout: Layout) -> Candidate:
    """The candidate that the search would have made of it. Raises ConfigError."""
    layers = problem.costs.shape.layers
    for replica in layout.replicas:
        if sum(s.layers for s in replica.stages) != layers:
            raise ConfigError(f"a replica's layers add up to {sum(s.layers for s in replica.stages)}, not to {layers}")
    uses = [tuple(_use(problem.pools, s) for s in r.stages) for r in layout.replicas]
    pools = [tuple(u.pool for u in mine) for mine in uses]
    pipelines = []
    for index, (replica, mine) in enumerate(zip(layout.replicas, uses, strict=True)):
        batching = Batching(replica.micro_batch_size, replica.micro_batches, len(uses))
        if len(uses) > 1:
            batching = replace(batching, sync=slowest_sync(problem.links, pools, index))
        pipelines.append(_pipeline(problem, layout, replica, mine, batching))
    return Candidate(tuple(pipelines), 0.0)


def _pipeline(
    problem: Problem, layout: Layout, replica: ReplicaLayout, uses: tuple[PoolUse, ...], batching: Batching
) -> Pipeline:
    schedule = SCHEDULES.get(layout.schedule)
    if schedule is None:
        raise ConfigError(f"'{layout.schedule}' is no schedule", hint=nearest(layout.schedule, SCHEDULES))
    choices = tuple(MemoryChoice(Mode(layout.recompute), s.shards) for s in replica.stages)
    times = PipelineTimes(
        stages=(),
        hops=(),
        bridged=(),
        micro_batches=batching.micro_batches,
        forwards_ahead=(replica.forwards_ahead or schedule.in_flight(len(uses), batching.micro_batches))
        * layout.chunks,
        layers=dealt_out([s.layers for s in replica.stages], layout.chunks),
        schedule=schedule.name,
        chunks=layout.chunks,
    )
    memory = (0,) * len(uses) * layout.chunks
    return with_times(problem, Pipeline(uses, batching, choices * layout.chunks, (), memory, times))


def _use(pools: Sequence[Pool], stage: StageLayout) -> PoolUse:
    found = [p for p in pools if stage.pool in (p.device_class, p.name, f"{p.island}/{p.device_class}")]
    if len(found) != 1:
        names = [f"{p.island}/{p.device_class}" for p in pools]
        raise ConfigError(
            f"'{stage.pool}' is {'no pool' if not found else 'several pools'} here", hint=", ".join(names)
        )
    if stage.width * stage.tensor > found[0].size:
        raise ConfigError(
            f"a stage asks for {stage.width * stage.tensor} of the {found[0].size} devices of {stage.pool}"
        )
    return PoolUse(found[0], stage.tensor, 1, stage.width)


def _under(engine: Engine, pipeline: Pipeline) -> PipelineTimes:
    """The pipeline's times as that program has them."""
    times, stages = pipeline.times, pipeline.times.stages
    if engine.exposed_sums:
        known = zip(stages, pipeline.costs, times.layers, strict=True)
        stages = tuple(replace(s, sync_s=costs.sums.at(n)) for s, costs, n in known)
    return replace(times, stages=stages, blocking=engine.blocking_transfers)


def layout_of(candidate: Candidate) -> Layout:
    """A candidate as a layout: clones are replicas of their own."""
    replicas: list[ReplicaLayout] = []
    for pipeline in candidate.pipelines:
        devices, clones = len(pipeline.layers) // pipeline.chunks, candidate.clones
        stages = tuple(
            StageLayout(use.pool.name, sum(pipeline.layers[d::devices]), use.width // clones, use.tensor, choice.shards)
            for d, (use, choice) in enumerate(zip(pipeline.stage_uses[:devices], pipeline.choices, strict=False))
        )
        batching, ahead = pipeline.batching, pipeline.forwards_ahead if pipeline.chunks == 1 else None
        replicas += [ReplicaLayout(stages, batching.micro_batch_size // clones, batching.micro_batches, ahead)] * clones
    first = candidate.pipelines[0]
    return Layout(tuple(replicas), first.schedule, first.chunks, first.choices[0].mode.recompute)
