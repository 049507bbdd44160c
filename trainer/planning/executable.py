"""What this trainer can execute of all that a plan may say. No torch: the launcher's side asks before it starts."""

from __future__ import annotations

from operator import attrgetter

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.plan import Plan, Replica
from hetctl.trainer.families.registry import family_of, trained_families
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import cannot_cut
from hetctl.trainer.recipe import Recipe
from hetctl.trainer.schedule import SCHEDULES


def check_trainable(shape: ModelShape, plan: Plan | None = None) -> None:
    """Raise ConfigError for models that can be planned but not trained, or not cut as the plan says."""
    trained = trained_families()
    if family_of(shape.family) not in trained:
        raise ConfigError(
            f"'{shape.name}' can be planned, not trained: hetctl's model is {' and '.join(f.title for f in trained)}",
            hint=f"choose a {' or '.join(f.model_type for f in trained)} model",
        )
    for degree in dict.fromkeys(s.tensor_parallel for r in plan.replicas for s in r.stages) if plan else ():
        if why := cannot_cut(shape, degree):
            raise ConfigError(f"tensor_parallel {degree} is not possible: {why}", hint="choose another degree")


def check_executable(plan: Plan, *, compiled: bool = False) -> None:
    """Raise ConfigError for what a plan may say but this trainer does not run."""
    if plan.schedule not in SCHEDULES:
        raise ConfigError(f"schedule '{plan.schedule}' is not known", hint=nearest(plan.schedule, SCHEDULES))
    if SCHEDULES[plan.schedule].splits_backward and compiled:
        raise ConfigError(
            f"compiled blocks cannot put off their weight gradients, as the {plan.schedule} schedule asks",
            hint="train.compile=false, or another parallelism.schedule",
        )
    for number, replica in enumerate(plan.replicas):
        _check_chunks(plan, number, replica)
    for stage in (s for r in plan.replicas for s in r.stages):
        for what, odd in (
            (f"shards {stage.shards} of a width of {stage.width}", stage.width % stage.shards != 0),
            ("recompute", stage.recompute not in ("none", "selective", "full")),
            ("offload_activations beside recompute", stage.offload_activations and stage.recompute != "none"),
        ):
            if odd:
                raise ConfigError(f"the plan asks for {what}, which the trainer does not run yet")


def check_wishes(plan: Plan, recipe: Recipe) -> None:
    """Raise ConfigError where a recipe pins what a plan has otherwise: the plan is run as it is."""
    wish, stages = recipe.parallelism, [s for r in plan.replicas for s in r.stages]
    piped = [r for r in plan.replicas if len(r.stages) > 1]
    longest = max(plan.replicas, key=lambda r: len(r.stages))
    has: dict[str, tuple[object, set[object]]] = {
        "parallelism.data": (wish.data, {len(plan.replicas)}),
        "parallelism.pipeline": (wish.pipeline, {len({s.ranks for s in r.stages}) for r in plan.replicas}),
        "parallelism.tensor": (wish.tensor, {s.tensor_parallel for s in stages}),
        "parallelism.layers": (wish.layers or "auto", {_layers(r) for r in plan.replicas}),
        "parallelism.schedule": (wish.schedule, {plan.schedule} if piped else {wish.schedule}),
        "parallelism.forwards_ahead": (wish.forwards_ahead, {longest.forwards_ahead or plan.forwards_ahead}),
        "parallelism.recompute": (wish.recompute, {s.recompute for s in stages}),
        "parallelism.activations": (wish.activations, {"host" if s.offload_activations else "device" for s in stages}),
        "parallelism.optimizer_state": (wish.optimizer_state, {"host" if s.offload else "device" for s in stages}),
        "batch.micro_batch_size": (recipe.batch.micro_batch_size, {s.micro_batch_size for s in stages}),
        "bridge.transport": (recipe.bridge.transport, {b.transport for b in plan.bridges} or {recipe.bridge.transport}),
    }
    for key, (wanted, found) in has.items():
        if wanted != "auto" and found != {wanted}:
            there = " and ".join(sorted(map(str, found)))
            raise ConfigError(
                f"the plan was made with {key} {there}, the recipe asks for {wanted}",
                hint=f"leave it out, or make the plan anew: `hetctl plan --set {key}=... -o plan.yaml`",
            )


def _layers(replica: Replica) -> tuple[int, ...]:
    """How many layers each device of a replica holds, along its pipeline."""
    held: dict[tuple[int, ...], int] = {}
    for stage in replica.stages:
        held[stage.ranks] = held.get(stage.ranks, 0) + stage.depth
    return tuple(held.values())


def _check_chunks(plan: Plan, number: int, replica: Replica) -> None:
    """Devices that hold several stages hold equally many, in turn, and run them alike."""
    held = {r.stages for r in plan.ranks_of_replica.get(number, ())}
    chunks = {len(stages) for stages in held}
    if chunks == {1}:
        return
    place, count = f"replica {number}", len(replica.stages)
    if len(chunks) > 1 or count % max(chunks):
        raise ConfigError(f"{place}: every device must hold equally many stages, found {sorted(chunks)}")
    devices = count // max(chunks)
    schedule, able = SCHEDULES[plan.schedule], [s.name for s in SCHEDULES.values() if max(s.chunks) > 1]
    if schedule.name not in able or held != {tuple(range(d, count, devices)) for d in range(devices)}:
        raise ConfigError(
            f"{place}: several stages on a device need the {' or '.join(able)} schedule, dealt out in turn"
        )
    if why := schedule.why_not(devices, replica.stages[0].micro_batches):
        raise ConfigError(f"{place}: {why}", hint="choose another parallelism.schedule or batch")
    for stages in held:
        manner = attrgetter("ranks", "micro_batch_size", "tensor_parallel", "shards", "offload")
        if len({manner(replica.stages[s]) for s in stages}) > 1:
            raise ConfigError(f"{place}: stages {list(stages)} are on the same devices, but not alike")
