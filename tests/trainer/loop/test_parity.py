"""Parity in fp64: any layout trains exactly as one process does, and bugs that would break that are caught."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from hetctl.comm.contract.placement import PlacedBridge
from hetctl.trainer.model.adapters import Adapters
from hetctl.trainer.model.shapes import ModelShape
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
COUNTS = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 70), Pipe((Cut((0, 4), (1,)),), 1, 58)))
SIZES = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 2, 3), Pipe((Cut((0, 4), (1,)),), 1, 3)))
IDLE = Layout(((0, 1), (2,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (2,))), 2, 4),))
TENSOR = Layout(((0, 1),), (Pipe((Cut((0, 4), (0, 1), tensor=2),), 2, 4),))
TENSOR_STAGES = Layout(
    ((0, 1, 2, 3), (4, 5)),
    (Pipe((Cut((0, 1), (0, 1, 2, 3), tensor=2, recompute="full"), Cut((1, 4), (4, 5), tensor=2)), 2, 4),),
)
TENSOR_TO_ONE = Layout(
    ((0, 1, 2), (3, 4)),
    (Pipe((Cut((0, 2), (0, 1, 2), 3), Cut((2, 4), (3, 4), tensor=2, recompute="selective")), 4, 2),),
)
TENSOR_FOUR = Layout(((0, 1, 2, 3),), (Pipe((Cut((0, 4), (0, 1, 2, 3), tensor=4),), 2, 4),))
TENSOR_REPLICAS = Layout(
    ((0, 1), (2, 3, 4, 5)),
    (
        Pipe((Cut((0, 4), (0, 1), tensor=2),), 1, 4),
        Pipe((Cut((0, 4), (2, 3, 4, 5), 2, tensor=2),), 2, 2),
    ),
)
UNLIKE_TENSORS = Layout(
    ((0, 1, 2, 3), (4, 5)),
    (
        Pipe((Cut((0, 4), (0, 1, 2, 3), tensor=4),), 1, 3),
        Pipe((Cut((0, 3), (4,)), Cut((3, 4), (5,))), 1, 5),
    ),
)
INTERLEAVED = Layout(
    ((0,), (1,)),
    (Pipe(tuple(Cut((i, i + 1), (i % 2,)) for i in range(4)), 2, 4),),
    schedule="interleaved",
)
INTERLEAVED_WIDE = Layout(
    ((0, 1, 2), (3, 4)),
    (
        Pipe(tuple(Cut((i, i + 1), ((0, 1), (3, 4))[i % 2], 1 + i % 2) for i in range(4)), 2, 2),
        Pipe((Cut((0, 4), (2,)),), 1, 4),
    ),
    schedule="interleaved",
)
ZERO_BUBBLE = Layout(
    ((0,), (1,), (2,)),
    (Pipe((Cut((0, 1), (0,)), Cut((1, 3), (1,), recompute="full"), Cut((3, 4), (2,), recompute="selective")), 2, 4),),
    schedule="zero-bubble",
)
ZERO_BUBBLE_REPLICAS = Layout(
    ((0, 1), (2,)),
    (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 1, 5), Pipe((Cut((0, 4), (2,)),), 1, 3)),
    schedule="zero-bubble",
)
ZERO_BUBBLE_TENSOR = Layout(
    ((0, 1), (2, 3)),
    (Pipe((Cut((0, 2), (0, 1), tensor=2), Cut((2, 4), (2, 3), 2)), 4, 2),),
    ahead=(3, 1),
    schedule="zero-bubble",
)
HOST_ACTIVATIONS = Layout(
    ((0, 1), (2, 3)),
    (
        Pipe(
            (
                Cut((0, 2), (0, 1), tensor=2, host_activations=True),
                Cut((2, 4), (2, 3), 2, offload=True, host_activations=True),
            ),
            2,
            4,
        ),
    ),
    ahead=(3, 1),
    schedule="zero-bubble",
)
GPIPE = Layout(
    ((0, 1), (2,)),
    (Pipe((Cut((0, 1), (0,)), Cut((1, 3), (1,), recompute="full"), Cut((3, 4), (2,))), 2, 4),),
    ahead=(4, 4, 4),
    schedule="gpipe",
)
LAYOUTS = {
    "1+1": ONE_EACH,
    "gpipe": GPIPE,
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
    "counts 70:58": COUNTS,
    "sizes 2:1": SIZES,
    "two classes in one island, 5:3": TWO_CLASSES,
    "tensor 2": TENSOR,
    "tensor 2, two stages": TENSOR_STAGES,
    "tensor 1 to 2": TENSOR_TO_ONE,
    "tensor 2, replicas": TENSOR_REPLICAS,
    "tensor 4": TENSOR_FOUR,
    "tensor 4 beside stages": UNLIKE_TENSORS,
    "activations on the host": HOST_ACTIVATIONS,
    "interleaved": INTERLEAVED,
    "interleaved, wide, beside one stage": INTERLEAVED_WIDE,
    "zero bubble": ZERO_BUBBLE,
    "zero bubble, tensor 2 to shards": ZERO_BUBBLE_TENSOR,
}
# the same ideas with more ranks or micro-batches; measured
SLOW = {
    "counts 70:58",
    "tensor 4",
    "tensor 4 beside stages",
    "tensor 2, two stages",
    "tensor 2, replicas",
    "2 shards beside 3",
    "interleaved, wide, beside one stage",
}
TIED = replace(SHAPE, family="qwen2", qkv_bias=True, tied_embeddings=True)
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
OPT = replace(SHAPE, family="opt", kv_heads=4, max_seq_len=32, tied_embeddings=True, **BIASES)
GEMMA = replace(SHAPE, head_dim=8, tied_embeddings=True, embedding_scale=4.0, attention_scale=0.3, logit_cap=0.7)
FAMILIES = {  # what each computes unlike Llama, on samples of 12 tokens
    "mistral": replace(SHAPE, family="mistral", windows=(5,) * 4),
    "qwen3": replace(SHAPE, family="qwen3", head_dim=8, windows=(0, 0, 5, 5), **BIASES | {"mlp_bias": False}),
    "gemma2": replace(GEMMA, family="gemma2", windows=(5, 0) * 2, attention_cap=0.5),
    "gemma3": replace(GEMMA, family="gemma3_text", windows=(3, 3, 3, 0), local_rope_theta=100.0),
    "phi3": replace(SHAPE, family="phi3", head_dim=8, rotated=0.5),
    "olmo2": replace(SHAPE, family="olmo2"),
    "smollm3": replace(SHAPE, family="smollm3", unrotated=(1, 3), **BIASES),
    "granite": replace(SHAPE, family="granite", embedding_scale=3.0, residual_scale=0.4, logit_divisor=6.0, **BIASES),
}


ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTED = replace(SHAPE, adapters=Adapters(3, 6.0, ALL_LINEAR))
# rows of 16 values, which fill no block, and of 256, which four ranks cut between blocks
QUANTISED = replace(SHAPE, head_dim=64, intermediate=256, adapters=Adapters(3, 6.0, ALL_LINEAR[:5], quantised="nf4"))
DORA = replace(SHAPE, adapters=Adapters(3, 6.0, ALL_LINEAR, dora=True))


def cases(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def deviation(
    layout: Layout,
    optimizer: str,
    *,
    clip_norm: float = 0.5,
    plant: str = "",
    shape: ModelShape = SHAPE,
    **train: Any,
) -> float:
    samples = sum(p.micro_batch_size * p.micro_batches for p in layout.pipes)
    asked = recipe(optimizer, clip_norm=clip_norm, global_batch=samples, **train)
    sizes = tuple(len(island) for island in layout.islands)
    found = on_islands(sizes, train_layout, layout, asked, shape, plant, seconds=60 + 2 * samples)
    return difference(found, reference(asked, shape))


JOINED = [
    "2+2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("1+1+1", "replicas 5:3", "interleaved", "zero bubble")),
]


@pytest.mark.parametrize("name", JOINED)
def test_islands_that_one_native_library_joins_train_as_one_process_does(name: str) -> None:
    layout, asked = LAYOUTS[name], recipe("adamw", clip_norm=0.5, global_batch=8)
    sizes = tuple(map(len, layout.islands))
    pairs = combinations([f"island{n}" for n in range(len(sizes))], 2)
    ways = tuple(PlacedBridge(pair, "native") for pair in pairs)
    found = on_islands(sizes, train_layout, layout, asked, SHAPE, "", "cpu", "native", bridges=ways)
    assert difference(found, reference(asked)) < TOLERANCE


@pytest.mark.parametrize("name", cases(*LAYOUTS))
def test_every_layout_trains_as_one_process_does(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw") < TOLERANCE


@pytest.mark.parametrize("name", cases("2+2", "replicas 5:3", "2 shards beside 3", "tensor 2, replicas", "zero bubble"))
def test_another_optimizer_too(name: str) -> None:
    """SGD shows gradients as they are: AdamW forgives a constant factor."""
    assert deviation(LAYOUTS[name], "sgd") < TOLERANCE


@pytest.mark.parametrize(
    "name", cases("1+1+1", "replicas 5:3", "1+2", "tensor 2, two stages", "tensor 1 to 2", "tensor 4")
)
def test_a_tied_embedding_is_one_parameter_wherever_its_ends_are(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=TIED) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    cases(
        "1+1",
        "1+2",
        "1+1+1",
        "2 shards beside 3",
        "offloaded",
        "activations on the host",
        "sizes 2:1",
        "tensor 1 to 2",
        "tensor 2, replicas",
        "tensor 4 beside stages",
        "interleaved",
        "zero bubble",
        "zero bubble, tensor 2 to shards",
    ),
)
def test_adapters_of_frozen_weights_too(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=ADAPTED) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    cases(
        "1+1",
        "1+2",
        "1+1+1",
        "2 shards beside 3",
        "recomputed",
        "activations on the host",
        "tensor 2",
        "tensor 1 to 2",
        "tensor 4 beside stages",
        "zero bubble, tensor 2 to shards",
    ),
)
def test_adapters_with_magnitudes_too(name: str) -> None:
    """Norms of rows that a tensor group cuts are sums over it."""
    assert deviation(LAYOUTS[name], "adamw", shape=DORA) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1+2", ADAPTED),
        ("recomputed", DORA),
        ("tensor 1 to 2", DORA),
        ("sizes 2:1", ADAPTED),
        ("zero bubble, tensor 2 to shards", ADAPTED),
        pytest.param("1+1+1", DORA, marks=pytest.mark.slow),
        pytest.param("activations on the host", DORA, marks=pytest.mark.slow),
        pytest.param("tensor 4 beside stages", DORA, marks=pytest.mark.slow),
    ],
)
def test_dropout_leaves_out_the_same_wherever_it_is_computed(name: str, shape: ModelShape) -> None:
    dropping = replace(shape, adapters=replace(shape.adapters, dropout=0.25))
    assert deviation(LAYOUTS[name], "adamw", shape=dropping) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "over"),
    [("copies of 2 shards", "all"), pytest.param("tensor 2, replicas", "replicas", marks=pytest.mark.slow)],
)
def test_magnitudes_in_shards_too(name: str, over: str) -> None:
    tied = replace(TIED, out_bias=True, adapters=replace(DORA.adapters, targets=("q_proj", "o_proj", "down_proj")))
    assert deviation(LAYOUTS[name], "sgd", shape=tied, plant="small buckets", sharded=over) < TOLERANCE


@pytest.mark.parametrize(
    "name", cases("sharded beside stages", "copies of 2 shards", "2 shards beside 3", "tensor 2, replicas")
)
def test_frozen_weights_in_shards_too(name: str) -> None:
    tied = replace(TIED, adapters=Adapters(2, 1.0, ("q_proj", "down_proj")))
    assert deviation(LAYOUTS[name], "sgd", shape=tied, plant="small buckets", sharded="all") < TOLERANCE


@pytest.mark.parametrize(
    "name",
    cases("1+1", "1+2", "recomputed", "activations on the host", "tensor 1 to 2", "tensor 4", "zero bubble"),
)
def test_quantised_weights_train_adapters_as_what_they_come_to_does(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=QUANTISED) < TOLERANCE


@pytest.mark.parametrize("name", cases("1+1", "tensor 2, replicas"))
def test_quantised_weights_beside_magnitudes_too(name: str) -> None:
    assert QUANTISED.adapters is not None
    shape = replace(QUANTISED, adapters=replace(QUANTISED.adapters, dora=True))
    assert deviation(LAYOUTS[name], "adamw", shape=shape) < TOLERANCE


@pytest.mark.parametrize("name", cases("2 to 3", "sharded beside stages", "2 shards beside 3", "tensor 2, replicas"))
def test_quantised_weights_in_shards_too(name: str) -> None:
    assert QUANTISED.adapters is not None
    shape = replace(QUANTISED, adapters=replace(QUANTISED.adapters, quantised="int8"))
    assert deviation(LAYOUTS[name], "sgd", shape=shape, plant="small buckets", sharded="all") < TOLERANCE


@pytest.mark.parametrize("name", cases("1+2", "tensor 2, replicas", "tensor 4"))
def test_state_of_adapters_over_all_replicas_too(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=ADAPTED, sharded="replicas") < TOLERANCE


def test_learned_positions_norms_with_biases_and_biased_mlps_too() -> None:
    assert deviation(LAYOUTS["1+2"], "adamw", shape=OPT) < TOLERANCE


@pytest.mark.parametrize("name", ["1+2", pytest.param("tensor 1 to 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_families_of_many_differences_too(family: str, name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=FAMILIES[family]) < TOLERANCE


PACKED = [
    *("1+1", "1+2", "1+1+1"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("recomputed", "activations on the host", "tensor 1 to 2")),
]


@pytest.mark.parametrize("name", PACKED)
def test_packed_conversations_train_as_one_at_a_time_does(name: str) -> None:
    assert deviation(LAYOUTS[name], "adamw", packing=True) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("shape", [FAMILIES["gemma3"], OPT], ids=["windows", "learned positions"])
def test_packed_conversations_under_windows_and_learned_positions_too(shape: ModelShape) -> None:
    assert deviation(LAYOUTS["1+2"], "sgd", shape=shape, packing=True) < TOLERANCE


@pytest.mark.parametrize(("plant", "shape"), [("documents unseen", SHAPE), ("positions go on", OPT)])
def test_conversations_that_do_not_stand_alone_are_noticed(plant: str, shape: ModelShape) -> None:
    """Rotary positions only count from token to token: learned ones show where they begin."""
    assert deviation(LAYOUTS["1+1"], "adamw", plant=plant, shape=shape, packing=True) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1+1", "1+2", "1+1+1", "tensor 4", "zero bubble"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_kind_of_layout(family: str, name: str) -> None:
    assert deviation(LAYOUTS[name], "sgd", shape=FAMILIES[family]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas 5:3", "tensor 1 to 2", "tensor 2, replicas", "zero bubble"])
@pytest.mark.parametrize("tied", [False, True])
def test_learned_positions_in_every_kind_of_layout(name: str, tied: bool) -> None:
    shape = replace(OPT, tied_embeddings=tied)
    assert deviation(LAYOUTS[name], "adamw", shape=shape, sharded="auto" if tied else "all") < TOLERANCE


@pytest.mark.parametrize(
    "name", cases("sharded beside stages", "copies of 2 shards", "2 shards beside 3", "tensor 2, replicas")
)
@pytest.mark.parametrize("shape", [SHAPE, pytest.param(TIED, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_weights_and_gradients_in_shards_too(name: str, shape: ModelShape) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=shape, plant="small buckets", sharded="all") < TOLERANCE


@pytest.mark.parametrize(
    "name",
    cases(
        "1+1",
        "replicas 5:3",
        "sharded beside stages",
        "copies of 2 shards",
        "2 shards beside 3",
        "tensor 2, replicas",
        "tensor 4 beside stages",
        "offloaded",
    ),
)
@pytest.mark.parametrize("shape", [SHAPE, pytest.param(TIED, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_optimiser_state_over_all_replicas_too(name: str, shape: ModelShape) -> None:
    assert deviation(LAYOUTS[name], "adamw", shape=shape, plant="small buckets", sharded="replicas") < TOLERANCE


def test_tensor_groups_whose_ranks_come_at_unlike_places_keep_their_state_in_the_stage() -> None:
    """They add up the gradients of copied heads part by part: their parts have to be the same ones."""
    pipes = tuple(Pipe((Cut((0, 4), ranks, tensor=4),), 1, n) for ranks, n in (((0, 1, 2, 7), 2), ((4, 5, 6, 3), 1)))
    crossed = Layout((tuple(range(8)),), pipes)
    assert deviation(crossed, "adamw", plant="small buckets", sharded="replicas") < TOLERANCE


def test_sums_start_in_one_order_whatever_the_depth_of_split_backwards() -> None:
    """Embedding and head are done before what was put off: also in a replica of one stage."""
    assert deviation(ZERO_BUBBLE_REPLICAS, "adamw", plant="small buckets") < TOLERANCE


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
        ("copies count twice", "tensor 2"),
        ("copies not summed", "tensor 4"),
        ("lost weight gradient", "zero bubble"),
    ],
)
def test_planted_bugs_are_caught(plant: str, layout: str) -> None:
    assert deviation(LAYOUTS[layout], "adamw", plant=plant) > 1e-6
