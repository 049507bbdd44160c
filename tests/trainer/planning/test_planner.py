"""The planner's answers that others published, and the ones it must refuse."""

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.problem import read_problem
from hetctl.trainer.recipe import load_recipe


def described(spec: str) -> Cluster:
    return describe_cluster(parse_spec(spec, CLASSES), CLASSES)


def labelled(spec: str) -> Cluster:
    islands = parse_spec(spec, CLASSES)
    return label_machine(islands, Machine("here", "gloo", (2 * 2**30,) * sum(i.count for i in islands)))


def islands_and_layers(plan: Plan) -> list[list[tuple[str, int]]]:
    """Of each replica: the layers of each group of devices, which may hold several stages."""
    found: list[list[tuple[str, int]]] = []
    for replica in plan.replicas:
        held: dict[tuple[int, ...], int] = {}
        for stage in replica.stages:
            held[stage.ranks] = held.get(stage.ranks, 0) + stage.layers[1] - stage.layers[0]
        found.append([(plan.ranks[ranks[0]].island, layers) for ranks, layers in held.items()])
    return found


TWO_STAGES = [  # as they were published
    ("parallelism.pipeline", 2),
    ("parallelism.order", "given"),
    ("parallelism.schedule", "1f1b"),
    ("batch.global_batch", 128),
]


@pytest.mark.parametrize(
    ("model", "speeds", "split", "expected"),
    [
        ("llama-8b", (549.7, 534.9), "auto", (17, 15)),
        ("qwen2-7b", (557.4, 514.5), "auto", (16, 12)),
        ("gpt-3.6b", (197, 160), "holmes", (16, 14)),
        ("gpt-39b", (197, 160), "holmes", (26, 22)),
        ("llama-8b", (549.7, 100), "uniform", (16, 16)),
    ],
)
def test_published_splits(model: str, speeds: tuple[float, float], split: str, expected: tuple[int, int]) -> None:
    sizes = [("model.name", model), ("model.seq_len", 2048), ("parallelism.split", split)]
    plan = make_plan(
        described("h200:8,mi325x:8"),
        load_recipe(None, sizes + TWO_STAGES),
        speeds=dict(zip(("h200", "mi325x"), speeds, strict=True)),
    )
    assert islands_and_layers(plan) == [[("h200", expected[0]), ("mi325x", expected[1])]]


def test_two_generations_of_one_vendor_finish_together() -> None:
    """No published split of A100 and A40 was at hand, so that both take as long is all that is asked."""
    asked = load_recipe(None, [("model.name", "llama-8b"), ("model.seq_len", 2048), *TWO_STAGES])
    cluster = described("a100:8,a40:8")
    [[(first, most), (second, least)]] = islands_and_layers(make_plan(cluster, asked))
    assert (first, second, most + least) == ("a100", "a40", 32)
    problem = read_problem(cluster, asked)
    fast, slow = (problem.costs.block(p.rates, 1).both for p in problem.pools)
    head = problem.costs.head(problem.pools[1].rates, 1).both
    assert most * fast == pytest.approx(least * slow + head, abs=slow)


def test_labels_decide_islands_not_speed() -> None:
    plan, equal = (make_plan(labelled(spec), load_recipe(None)) for spec in ("b200:2,mi100:2", "h100:2,mi300x:2"))
    assert [layers for _, layers in islands_and_layers(plan)[0]] == [n for _, n in islands_and_layers(equal)[0]]
    assert len(plan.replicas[0].stages) == 2
    assert {g.backend for g in plan.groups if g.kind == "data"} == {"gloo"}
    assert {g.backend for g in plan.groups if g.kind == "pipeline"} == {"het"}


def test_a_forced_bridge_that_is_impossible_says_why() -> None:
    with pytest.raises(ConfigError, match="described islands share no host"):
        make_plan(described("h200:8,mi325x:8"), load_recipe(None, [("bridge.transport", "shm")]))


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises((Infeasible, ConfigError), match="layers"):
        make_plan(labelled("h200:20"), load_recipe(None, [("parallelism.pipeline", 9)]))


@pytest.mark.parametrize(("model", "expected"), [("gpt-3.6b", (16, 14)), ("gpt-39b", (26, 22))])
def test_holmes_needs_nothing_pinned(model: str, expected: tuple[int, int]) -> None:
    sizes = [
        ("model.name", model),
        ("model.seq_len", 2048),
        ("batch.global_batch", 128),
        ("parallelism.split", "holmes"),
    ]
    plan = make_plan(described("h200:8,mi325x:8"), load_recipe(None, sizes), speeds={"h200": 197, "mi325x": 160})
    assert islands_and_layers(plan) == [[("h200", expected[0]), ("mi325x", expected[1])]]


def test_a_pinned_tensor_degree_stays_inside_hosts_and_says_so() -> None:
    plan = make_plan(described("h200:16,mi325x:8"), load_recipe(None, [("parallelism.tensor", 4)]))
    stages = [s for r in plan.replicas for s in r.stages]
    assert {s.tensor_parallel for s in stages} == {4}
    for group in (g for g in plan.groups if g.kind == "tensor"):
        assert len({plan.ranks[r].host for r in group.ranks}) == 1
        assert len(group.ranks) == 4
    assert any("Tensor groups of 4" in reason for reason in plan.reasons)


def test_an_impossible_tensor_degree_names_what_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="28 heads"):
        make_plan(described("h200:8"), load_recipe(None, [("model.name", "qwen2-7b"), ("parallelism.tensor", 8)]))


@pytest.mark.parametrize(("samples", "degree"), [(1, 8), (4, 2), (8, 1)])
def test_fewer_samples_than_devices_are_shared_by_tensor_groups(samples: int, degree: int) -> None:
    sets = [("model.name", "llama-8b"), ("model.seq_len", 8192), ("batch.global_batch", samples)]
    plan = make_plan(described("h200:8"), load_recipe(None, sets))
    assert [(s.tensor_parallel, len(s.ranks)) for r in plan.replicas for s in r.stages] == [(degree, 8)]


@pytest.mark.parametrize(
    ("pins", "blamed", "spared"),
    [
        ([("parallelism.pipeline", 2), ("parallelism.data", 8)], "parallelism.data=8", "parallelism.pipeline"),
        ([("parallelism.data", 2), ("batch.global_batch", 1)], "1 sample a step with parallelism.data=2", "pipeline"),
        ([("parallelism.layers", [2, 2, 2, 1, 1]), ("parallelism.tensor", 1)], "parallelism.layers", "tensor"),
    ],
)
def test_only_pins_that_stand_in_the_way_are_blamed(pins: list[tuple[str, object]], blamed: str, spared: str) -> None:
    with pytest.raises(Infeasible, match="no arrangement of 4 devices") as caught:
        make_plan(described("h200:4"), load_recipe(None, pins))
    assert blamed in caught.value.message
    assert spared not in caught.value.message + caught.value.hint


def test_a_pinned_micro_batch_is_each_replicas_own() -> None:
    """Also where replicas lie in one island, and the search treats them as one pipeline."""
    sizes = [("batch.micro_batch_size", 2), ("batch.global_batch", 16), ("parallelism.data", 2)]
    recipe = load_recipe(None, [*sizes, ("parallelism.pipeline", 1)])
    for spec in ("h200:2", "h200:1,mi325x:1"):
        replicas = make_plan(labelled(spec), recipe).replicas
        assert [(s.micro_batch_size, s.micro_batches) for r in replicas for s in r.stages] == [(2, 4)] * 2


def test_mfu_needs_every_device_s_peak() -> None:
    recipe = load_recipe(None, [("batch.global_batch", 64)])
    known = make_plan(described("h200:1,mi325x:1"), recipe).predicted
    unknown = make_plan(labelled("h200:1,mi325x:1"), recipe).predicted  # CPU processes stand for them
    assert known is not None
    assert known.mfu is not None
    assert 0 < known.mfu < 1
    assert unknown is not None
    assert unknown.mfu is None


@pytest.mark.parametrize("place", ["device", "host"])
def test_where_the_optimiser_s_state_is_can_be_pinned(place: str) -> None:
    sizes = [("model.name", "llama-1b"), ("batch.global_batch", 32), ("parallelism.optimizer_state", place)]
    plan = make_plan(described("h200:2,mi325x:2"), load_recipe(None, sizes))
    assert {s.offload for r in plan.replicas for s in r.stages} == {place == "host"}


def test_a_tied_embeddings_gradient_is_no_faster_than_the_bridge_that_it_crosses() -> None:
    wishes = [("model.name", "llama-1b"), ("model.seq_len", 2048), ("batch.global_batch", 16)]
    wishes += [("parallelism.pipeline", 2), ("parallelism.data", 1)]
    cluster = describe_cluster(parse_spec("rtx4090:1,rx7900xtx:1;1GbE", CLASSES), CLASSES)
    plan = make_plan(cluster, load_recipe(None, wishes))
    shape = load_recipe(None, wishes).shape()
    assert shape.tied_embeddings
    assert plan.predicted is not None
    crossing = shape.vocab * shape.hidden * 4 / 0.125e9  # fp32, once each way at once, over a full 1 GbE
    assert plan.predicted.step_time_s > crossing
    assert plan.predicted.bridge_share > 0.7 * crossing / plan.predicted.step_time_s
    assert any("crosses islands once a step too" in reason for reason in plan.reasons)


@pytest.mark.parametrize("link", ["10GbE", "25GbE"])
def test_forwards_in_flight_that_somebody_pins_are_hardly_faster_than_those_found(link: str) -> None:
    wishes = [("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 64)]
    cluster = describe_cluster(parse_spec(f"h100:4,mi325x:4;{link}", CLASSES), CLASSES)
    free = make_plan(cluster, load_recipe(None, wishes)).predicted
    assert free is not None
    for depth in (3, 4, 5, 6, 8):
        pinned = make_plan(cluster, load_recipe(None, [*wishes, ("parallelism.forwards_ahead", [depth, 1])])).predicted
        assert pinned is not None
        assert free.step_time_s <= 1.01 * pinned.step_time_s, depth
