"""What this trainer can execute of all that a plan may say. No torch: the launcher's side asks before it starts."""

from __future__ import annotations

from hetctl.comm.errors import ConfigError
from hetctl.comm.plan import Plan
from hetctl.trainer.shapes import ModelShape


def check_trainable(shape: ModelShape) -> None:
    """Raise ConfigError for models that can be planned but not trained."""
    if shape.family == "gpt":
        raise ConfigError(
            f"'{shape.name}' can be planned, not trained: hetctl's model is Llama and Qwen2",
            hint="choose a llama or qwen2 model",
        )


def check_executable(plan: Plan) -> None:
    """Raise ConfigError for what a plan may say but this trainer does not run."""
    for rank in plan.ranks:
        if len(rank.stages) > 1:
            raise ConfigError(f"rank {rank.rank} holds {len(rank.stages)} stages: interleaved schedules do not run yet")
    for stage in (s for r in plan.replicas for s in r.stages):
        for what, odd in (
            ("tensor_parallel", stage.tensor_parallel != 1),
            (f"shards {stage.shards} of a width of {stage.width}", stage.width % stage.shards != 0),
            ("recompute", stage.recompute not in ("none", "selective", "full")),
        ):
            if odd:
                raise ConfigError(f"the plan asks for {what}, which the trainer does not run yet")
