"""Memory-rich and memory-poor pairs, what binds, what would help, and models that cannot fit."""

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import Infeasible
from hetctl.trainer.planning.advise import Advice
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.explain import Explanation, explain
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, make_plan, weigh
from hetctl.trainer.recipe import load_recipe


def planning(spec: str, *sets: tuple[str, object]) -> Planning:
    cluster = describe_cluster(parse_spec(spec, CLASSES), CLASSES)
    return weigh(cluster, load_recipe(None, [("model.name", "llama-8b"), ("model.seq_len", 4096), *sets]))


def explained(made: Planning, *tried: Advice) -> Explanation:
    assert made.plan.predicted is not None
    return explain(made.problem, made.predictions, made.plan.predicted.memory_bytes, tried)


def test_of_40_and_80_gb_the_rich_comes_first_or_the_poor_saves_whichever_is_faster() -> None:
    sets = ("batch.global_batch", 48), ("parallelism.pipeline", 2), ("parallelism.tensor", 1)
    free = planning("a100-40g:4,a100:4", *sets)
    both = [
        planning("a100-40g:4,a100:4", *sets, ("parallelism.order", order))
        for order in (("a100", "a100-40g"), ("a100-40g", "a100"))
    ]
    fastest = min(both, key=lambda p: p.predictions[0].seconds)
    assert free.predictions[0].seconds == pytest.approx(fastest.predictions[0].seconds)
    first = free.plan.ranks[free.plan.replicas[0].stages[0].ranks[0]].island
    saves = any(s.recompute != "none" or s.offload for r in free.plan.replicas for s in r.stages)
    said = " ".join(free.plan.reasons)
    assert ("stands first" in said) == (first == "a100")
    assert ("the fastest way that does" in said) == saves
    assert first == "a100" or saves


def test_every_rank_stays_within_its_memory() -> None:
    plan = planning("a100-40g:4,a100:4", ("batch.global_batch", 48)).plan
    assert plan.predicted is not None
    for rank, need in zip(plan.ranks, plan.predicted.memory_bytes, strict=True):
        assert need <= (rank.memory_bytes or 0)


def test_a_model_that_cannot_fit_says_how_much_is_missing_where() -> None:
    cluster = describe_cluster(parse_spec("l4:2", CLASSES), CLASSES)
    recipe = load_recipe(None, [("model.name", "llama-70b"), ("model.seq_len", 4096)])
    with pytest.raises(Infeasible, match=r"GiB is missing on each l4 of l4 .*stage \d of replica 0") as caught:
        make_plan(cluster, recipe)
    assert caught.value.exit_code == 5


def test_wishes_that_exclude_each_other_are_named() -> None:
    cluster = describe_cluster(parse_spec("h200:2", CLASSES), CLASSES)
    recipe = load_recipe(None, [("parallelism.pipeline", 8), ("batch.micro_batch_size", 4)])
    with pytest.raises(Infeasible, match=r"with parallelism.pipeline=8$"):
        make_plan(cluster, recipe)


def test_a_slow_bridge_is_said_to_bind() -> None:
    made = planning(
        "rtx4090:1,rtx3090:1;1GbE",
        ("model.name", "llama-160m"),
        ("model.seq_len", 1024),
        ("batch.global_batch", 16),
        ("parallelism.pipeline", 2),
        ("parallelism.schedule", "1f1b"),
        ("bridge.transport", "tcp"),
    )
    assert "The bridge rtx" in explained(made).binds


def test_the_three_changes_that_gain_most_are_said() -> None:
    made = planning("h200:2", ("batch.global_batch", 16))
    tried = [Advice("add", f"Change {n}", 1, 1.0, 1.0, n / 10, None, None) for n in (1, 4, 2, 3)]
    gone = Advice("remove", "Leaving out", -1, 1.0, 1.0, 0.9, None, None)
    said = " ".join(explained(made, *tried, gone).sentences())
    assert "Change 4 gives +40.0%. Change 3 gives +30.0%. Change 2 gives +20.0%." in said
    assert "Change 1" not in said
    assert "Leaving out" not in said


def test_the_order_is_compared_with_the_given_one() -> None:
    made = planning(
        "h200:8,mi325x:8", ("parallelism.pipeline", 2), ("parallelism.data", 1), ("batch.global_batch", 256)
    )
    told = explained(made)
    assert "beats the given one" in told.order


def test_what_the_recipe_pins_is_not_said_to_be_the_fastest() -> None:
    made = planning(
        "h200:8", ("parallelism.recompute", "full"), ("batch.micro_batch_size", 2), ("batch.global_batch", 64)
    )
    said = " ".join((*made.plan.reasons, *explained(made).sentences()))
    assert "of which the recipe pins some" in said
    assert "micro-batches of 2, as the recipe pins it" in said
    assert "Memory binds" not in said
    few = planning("h200:8", ("parallelism.pipeline", 1), ("batch.global_batch", 6), ("parallelism.tensor", 1))
    assert any("idle: more would not make the step faster, within what" in reason for reason in few.plan.reasons)


def test_the_fullest_rank_is_said_with_all_that_it_holds() -> None:
    made = planning("h200:2", ("batch.global_batch", 2), ("parallelism.pipeline", 1), ("parallelism.tensor", 1))
    assert made.plan.replicas[0].stages[0].whole
    assert made.plan.predicted is not None
    share = made.plan.predicted.memory_bytes[0] / usable_bytes(made.problem.pools[0].rates)
    assert f"{share:.0%} of what is usable" in explained(made).binds


def test_the_larger_of_bridge_and_bubbles_binds() -> None:
    made = planning("h200:2,mi325x:2;100GbE", ("batch.global_batch", 8), ("parallelism.pipeline", 4))
    chosen = made.predictions[0]
    assert chosen.bubble_share > chosen.bridge_share
    assert "Bubbles bind" in explained(made).binds


def test_the_runner_up_of_one_stage_is_not_itself_under_another_schedule() -> None:
    made = planning("h200:2", ("batch.global_batch", 64), ("parallelism.pipeline", 1), ("parallelism.tensor", 1))
    pipelines = [p.candidate.pipelines[0] for p in made.predictions]
    assert len(pipelines) > 1
    assert all(len(p.layers) == 1 for p in pipelines)
    assert len({(p.stage_uses, p.batching) for p in pipelines}) == len(pipelines)
