"""Memory that a plan foretells, beside what H200s held: docs/benchmarks/311."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

MODEL = [("model.name", "llama-1b-untied"), ("model.seq_len", 4096), ("parallelism.tensor", 1)]
FULL, HOST = ("parallelism.recompute", "full"), ("parallelism.optimizer_state", "host")
MEASURED = [  # schedule, layers, forwards in flight, samples of a micro-batch and of a step, else; GiB of each rank
    ("1f1b", (16,), (1,), 1, 16, (), (25.5,)),
    ("1f1b", (16,), (1,), 4, 16, (), (46.2,)),
    ("1f1b", (16,), (1,), 4, 16, (FULL,), (24.6,)),
    ("zero-bubble", (16,), (1,), 4, 16, (), (46.2,)),
    ("zero-bubble", (16,), (1,), 2, 16, (FULL,), (28.4,)),
    ("zero-bubble", (16,), (1,), 4, 16, (FULL,), (38.1,)),
    ("1f1b", (16,), (1,), 4, 32, (HOST,), (33.8,)),
    ("1f1b", (8, 8), (2, 1), 1, 16, (), (15.2, 13.5)),
    ("eager-1f1b", (9, 7), (3, 1), 1, 16, (), (20.1, 12.1)),
    ("eager-1f1b", (10, 6), (5, 1), 1, 16, (), (29.2, 10.7)),
    ("eager-1f1b", (9, 7), (6, 1), 2, 32, (FULL,), (13.3, 11.2)),
    ("zero-bubble", (9, 7), (4, 1), 1, 16, (), (23.3, 14.1)),
    ("zero-bubble", (6, 10), (2, 1), 2, 16, (), (16.3, 26.9)),
    ("zero-bubble", (9, 7), (4, 1), 4, 32, (), (62.3, 31.6)),
    ("zero-bubble", (8, 8), (4, 1), 1, 16, (HOST,), (14.7, 9.6)),
]


@pytest.mark.parametrize(("schedule", "layers", "ahead", "micro", "samples", "more", "held"), MEASURED)
def test_memory_is_foretold_as_it_was_held(
    schedule: str,
    layers: tuple[int, ...],
    ahead: tuple[int, ...],
    micro: int,
    samples: int,
    more: tuple[tuple[str, object], ...],
    held: tuple[float, ...],
) -> None:
    pins: list[tuple[str, object]] = [
        ("batch.global_batch", samples),
        ("batch.micro_batch_size", micro),
        ("parallelism.schedule", schedule),
        ("parallelism.pipeline", len(layers)),
        ("parallelism.layers", layers),
        ("parallelism.order", "given"),
        ("parallelism.forwards_ahead", ahead),
    ]
    spec = "h200:1,mi325x:1" if len(layers) > 1 else "h200:1"
    recipe = load_recipe(None, [*MODEL, *pins, *more])
    plan = make_plan(describe_cluster(parse_spec(spec, CLASSES), CLASSES), recipe)
    assert plan.predicted is not None
    for foretold, measured in zip(plan.predicted.memory_bytes, held, strict=True):
        assert -0.02 < foretold / 2**30 / measured - 1 < 0.11
