"""What this trainer can execute of all that a plan may say. No torch: the launcher's side asks before it starts."""

from __future__ import annotations

from operator import attrgetter

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.plan import Plan, Replica
from hetctl.trainer.model.families import family_of, trained_families
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import cannot_cut
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
