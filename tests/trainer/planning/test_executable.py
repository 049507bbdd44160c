"""What a plan file holds is used or refused: never silently something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.executable import check_wishes
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

SIZES: list[tuple[str, Any]] = [("model.name", "llama-1b"), ("model.seq_len", 1024), ("batch.global_batch", 32)]


def pair() -> Cluster:
    return describe_cluster(parse_spec("h200:4,mi325x:4", CLASSES), CLASSES)


WISHES: list[tuple[tuple[str, Any], ...]] = [
    (("parallelism.pipeline", 2),),
    (("parallelism.data", 2),),
    (("parallelism.tensor", 2),),
    (("parallelism.layers", (10, 6)),),
    (("parallelism.pipeline", 2), ("parallelism.schedule", "gpipe")),
    (("parallelism.pipeline", 2), ("parallelism.schedule", "interleaved")),
    (("parallelism.pipeline", 2), ("parallelism.layers", (10, 6)), ("parallelism.schedule", "zero-bubble")),
    (("parallelism.pipeline", 1), ("parallelism.schedule", "gpipe")),
    (("parallelism.forwards_ahead", (4, 2)),),
    (("parallelism.recompute", "full"),),
    (("parallelism.activations", "host"),),
    (("batch.micro_batch_size", 8),),
    (("batch.micro_batch_size", 4), ("parallelism.data", 2)),
    (("bridge.transport", "tcp"), ("parallelism.pipeline", 2), ("parallelism.order", "given")),
]


@pytest.mark.parametrize("wishes", WISHES, ids=str)
def test_a_plan_is_run_under_the_recipe_that_it_was_made_from(wishes: tuple[tuple[str, Any], ...]) -> None:
    recipe = load_recipe(None, [*SIZES, *wishes])
    check_wishes(make_plan(pair(), recipe), recipe)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism.pipeline", 3),
        ("parallelism.data", 3),
        ("parallelism.tensor", 4),
        ("parallelism.layers", (8, 8)),
        ("parallelism.schedule", "gpipe"),
        ("parallelism.forwards_ahead", (32, 1)),
        ("parallelism.recompute", "full"),
        ("parallelism.activations", "host"),
        ("batch.micro_batch_size", 16),
        ("bridge.transport", "tcp"),
    ],
)
def test_what_a_recipe_pins_otherwise_than_the_plan_is_refused(key: str, value: Any) -> None:
    made = [("parallelism.layers", (10, 6)), ("parallelism.order", "given"), ("batch.micro_batch_size", 4)]
    plan = make_plan(pair(), load_recipe(None, [*SIZES, *made]))
    with pytest.raises(ConfigError, match=rf"the plan was made with {key} .*, the recipe asks for"):
        check_wishes(plan, load_recipe(None, [*SIZES, (key, value)]))


def test_stages_of_a_replica_that_take_unlike_micro_batches_are_refused() -> None:
    """The same samples in all, cut otherwise: what a stage gets is not what it expects."""
    plan = make_plan(pair(), load_recipe(None, [*SIZES, ("parallelism.layers", (10, 6))]))
    [replica] = plan.replicas
    first, last = replica.stages
    odd = replace(last, micro_batch_size=2 * last.micro_batch_size, micro_batches=last.micro_batches // 2)
    with pytest.raises(ConfigError, match=r"stage 1 takes .* micro-batches of .*, the first stage of its replica"):
        replace(plan, replicas=(replace(replica, stages=(first, odd)),)).validate(where="plan.yaml")
