"""Parity in fp64: any layout trains exactly as one process does, and bugs that would break that are caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetctl.trainer.shapes import ModelShape
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe
from tests.trainer.parity import SHAPE, difference, recipe, reference, train_layout

TOLERANCE = 1e-10
ONE_EACH = Layout(((0,), (1,)), (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 4),))
TWO_EACH = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 2), (0, 1)), Cut((2, 4), (2, 3))), 4, 2),))
UNEQUAL = Layout(((0,), (1, 2)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1, 2))), 4, 2),), ahead=(3, 1))
THREE = Layout(((0,), (1,), (2,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 3), (1,)), Cut((3, 4), (2,))), 2, 4),))
REPLICAS = Layout(
    ((0, 1), (2, 3)),
    (
        Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1,))), 1, 5),
        Pipe((Cut((0, 3), (2,)), Cut((3, 4), (3,))), 1, 3),
    ),
)
TWO_TO_THREE = Layout(((0, 1), (2, 3, 4)), (Pipe((Cut((0, 2), (0, 1)), Cut((2, 4), (2, 3, 4))), 4, 2),))
SHARDED = Layout(
    ((0, 1), (2, 3)), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 3), Pipe((Cut((0, 2), (2,)), Cut((2, 4), (3,))), 1, 2))
)
COPIES = Layout(((0, 1, 2, 3),), (Pipe((Cut((0, 4), (0, 1, 2, 3), 2),), 4, 2),))
UNEQUAL_SHARDS = Layout(
    ((0, 1), (2, 3, 4)), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 1), Pipe((Cut((0, 4), (2, 3, 4), 3, "full"),), 3, 2))
)
RECOMPUTED = Layout(
    ((0,), (1,)), (Pipe((Cut((0, 2), (0,), recompute="selective"), Cut((2, 4), (1,), recompute="full")), 2, 4),)
)
OFFLOADED = Layout(
    ((0, 1), (2,)),
    (Pipe((Cut((0, 2), (0, 1), 2, offload=True), Cut((2, 4), (2,), recompute="full", offload=True)), 2, 4),),
)
TWO_CLASSES = Layout(((0, 1),), (Pipe((Cut((0, 4), (0,)),), 1, 5), Pipe((Cut((0, 4), (1,)),), 1, 3)))
IDLE = Layout(((0, 1), (2,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (2,))), 2, 4),))
LAYOUTS = {
    "1+1": ONE_EACH,
    "2+2": TWO_EACH,
    "1+2": UNEQUAL,
    "1+1+1": THREE,
    "replicas 5:3": REPLICAS,
    "2 to 3": TWO_TO_THREE,
    "sharded beside stages": SHARDED,
    "copies of 2 shards": COPIES,
    "2 shards beside 3": UNEQUAL_SHARDS,
    "recomputed": RECOMPUTED,
    "offloaded": OFFLOADED,
    "an idle rank": IDLE,
    "two classes in one island, 5:3": TWO_CLASSES,
}
SAMPLES = 8


TIED = replace(SHAPE, family="qwen2", qkv_bias=True, tied_embeddings=True)


def deviation(
    layout: Layout,
    optimizer: str,
    *,
    clip_norm: float = 0.5,
    plant: str = "",
    shape: ModelShape = SHAPE,
    **train: Any,
) -> float:
    asked = recipe(optimizer, clip_norm=clip_norm, global_batch=SAMPLES, **train)
    sizes = tuple(len(island) for island in layout.islands)
    found = on_islands(sizes, train_layout, layout, asked, shape, plant)
    return difference(found, reference(asked, shape))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process_does(name: str, optimizer: str) -> None:
    assert deviation(LAYOUTS[name], optimizer) < TOLERANCE


@pytest.mark.parametrize("name", ["1+1+1", "replicas 5:3", "1+2"])
def test_a_tied_embedding_is_one_parameter_wherever_its_ends_are(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=TIED) < TOLERANCE


@pytest.mark.parametrize("name", ["sharded beside stages", "copies of 2 shards", "2 shards beside 3"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_weights_and_gradients_in_shards_too(name: str, shape: ModelShape) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=shape, plant="small buckets", sharded="all") < TOLERANCE


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_during_backward_and_after_it(overlap: bool) -> None:
    assert deviation(REPLICAS, "adamw", plant="small buckets", overlap=overlap) < TOLERANCE


def test_parity_holds_without_clipping() -> None:
    assert deviation(UNEQUAL, "sgd", clip_norm=0.0) < TOLERANCE


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        ("mean of means", "1+1"),
        ("factor two", "2+2"),
        ("dropped replica", "replicas 5:3"),
        ("stale activation", "1+2"),
    ],
)
def test_planted_bugs_are_caught(plant: str, layout: str) -> None:
    assert deviation(LAYOUTS[layout], "adamw", plant=plant) > 1e-6
