"""Measured paces: who is slower than its like, and counts that make the slowest replica as fast as can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.plan import Plan, Predicted, StageCost
from hetctl.trainer.adapt.pace import expected, rebalanced, stragglers, why_fixed, yardstick
from tests.layouts import Cut, Layout, Pipe, plan_of

PIPES = (
    Pipe((Cut((0, 2), (0, 1)), Cut((2, 4), (2, 3))), 2, 8),
    Pipe((Cut((0, 2), (4, 5)), Cut((2, 4), (6, 7))), 2, 8),
)


def plan(*pipes: Pipe) -> Plan:
    used = pipes or PIPES
    ranks = tuple(sorted(r for p in used for c in p.cuts for r in c.ranks))
    return plan_of(Layout((ranks,), used), seq_len=8)


def counts(made: Plan | None) -> list[int]:
    assert made is not None
    made.validate(where="test", layers=4)
    return [r.stages[0].micro_batches for r in made.replicas]


def test_a_rank_slower_than_its_like_is_named_with_its_ratio() -> None:
    paces = dict.fromkeys((0, 1, 4, 5), 1.0) | dict.fromkeys((2, 3, 6, 7), 3.0)  # the last stages have the head too
    assert stragglers(plan(), paces) == []
    (found,) = stragglers(plan(), paces | {5: 1.6})
    assert (found.rank, found.ratio) == (5, pytest.approx(1.6))
    assert "rank 5 (cpu on here) takes 1.60 times" in found.sentence


def test_other_kinds_of_devices_are_not_its_like() -> None:
    made = plan()
    slow = tuple(replace(r, device_class="l4") if r.rank in (4, 5, 6, 7) else r for r in made.ranks)
    paces = dict.fromkeys((0, 1, 2, 3), 1.0) | dict.fromkeys((4, 5, 6, 7), 3.0)
    mixed = replace(made, ranks=slow)
    assert stragglers(mixed, paces) == []
    assert {s.rank for s in stragglers(mixed, paces | {4: 9.0})} == {4}


def predicted(made: Plan, basis: str, *, block_s: float = 1.0) -> Plan:
    """The plan with so many seconds a layer predicted of each stage, and two more for the last one."""
    stages = tuple(
        tuple(
            StageCost.of(s, s.depth * block_s + 2 * (index == len(r.stages) - 1), block_s, 99)
            for index, s in enumerate(r.stages)
        )
        for r in made.replicas
    )
    about = Predicted(basis, 1.0, 1.0, 0.0, 0.0, None, (0,) * made.world_size, stages=stages)  # type: ignore[arg-type]
    return replace(made, predicted=about)


PAIR = Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 8)  # 2 s and 4 s predicted: neither has its like


def test_a_rank_alone_of_its_kind_is_held_against_a_measured_prediction() -> None:
    made = predicted(plan(PAIR), "measured")
    assert expected(made, 0) == 2.0
    assert expected(made, 1) == 4.0
    assert stragglers(made, {0: 2.0, 1: 4.4}) == []
    (found,) = stragglers(made, {0: 2.0, 1: 6.0})
    assert (found.rank, found.ratio, found.against) == (1, pytest.approx(1.5), "prediction")
    assert "rank 1 (cpu on here) takes 1.50 times as long as predicted" in found.sentence
    assert stragglers(made, {0: 3.0, 1: 6.0}) == []  # all of them are: no rank is waited for
    (found,) = stragglers(made, {0: 2.4, 1: 7.2})
    assert found.ratio == pytest.approx(1.5)  # beyond what slows everybody
    assert stragglers(plan(PAIR), {0: 2.0, 1: 60.0}) == []  # nothing was predicted


def test_an_island_that_is_slow_as_a_whole_is_named_though_its_ranks_are_alike() -> None:
    mixed = tuple(replace(r, device_class="mi325x") if r.rank > 3 else r for r in plan().ranks)
    made = predicted(replace(plan(), ranks=mixed), "measured")
    paces = {r: expected(made, r) or 0.0 for r in range(8)}
    assert stragglers(made, paces) == []
    slow = paces | {r: 1.4 * paces[r] for r in (4, 5, 6, 7)}
    assert {(s.rank, s.against) for s in stragglers(made, slow)} == {(r, "prediction") for r in (4, 5, 6, 7)}


def test_the_table_is_trusted_among_devices_of_one_kind_only_and_less() -> None:
    made = predicted(plan(PAIR), "table")
    assert stragglers(made, {0: 2.0, 1: 5.8}) == []
    assert {s.rank for s in stragglers(made, {0: 2.0, 1: 6.4})} == {1}
    unlike = replace(made, ranks=(made.ranks[0], replace(made.ranks[1], device_class="mi325x")))
    assert stragglers(unlike, {0: 2.0, 1: 60.0}) == []


def test_a_plan_whose_layers_were_edited_is_held_against_what_they_would_take() -> None:
    made = predicted(plan(PAIR), "measured")
    cut = [replace(s, layers=span) for s, span in zip(made.replicas[0].stages, ((0, 1), (1, 4)), strict=True)]
    edited = replace(made, replicas=(replace(made.replicas[0], stages=tuple(cut)),))
    assert (expected(edited, 0), expected(edited, 1)) == (1.0, 5.0)


def test_counts_follow_the_slowest_rank_of_each_replica() -> None:
    paces = dict.fromkeys(range(4), 1.0) | dict.fromkeys(range(4, 8), 1.0) | {6: 3.0}
    assert counts(rebalanced(plan(), paces)) == [13, 3]  # (13 + 1) turns of 1 s beside (3 + 1) of 3 s
    assert rebalanced(plan(), dict.fromkeys(range(8), 1.0)) is None


@given(st.lists(st.floats(0.5, 5), min_size=2, max_size=4), st.integers(4, 40))
def test_no_other_counts_would_be_faster(turns: list[float], total: int) -> None:
    one = [Pipe((Cut((0, 4), (r,)),), 1, 1) for r in range(len(turns) - 1)]
    made = plan(*one, Pipe((Cut((0, 4), (len(turns) - 1,)),), 1, total - len(turns) + 1))
    found = rebalanced(made, dict(enumerate(turns)))
    chosen = counts(found or made)
    slowest = max(m * t for m, t in zip(chosen, turns, strict=True))
    ideal = total / sum(1 / t for t in turns)
    assert sum(chosen) == total
    assert slowest <= max(ideal + max(turns), max(turns)) / (0.98 if found is None else 1.0)


def test_what_cannot_follow_says_why() -> None:
    assert "one replica" in why_fixed(plan(PIPES[0]))
    assert "sizes differ" in why_fixed(plan(PIPES[0], Pipe((Cut((0, 4), (4,)),), 1, 4)))
    assert why_fixed(plan()) == ""


def foretold(mfu: float | None, efficiency: float | None) -> Plan:
    predicted = Predicted("measured", 1.0, 1000.0, 0.0, 0.0, efficiency, (0,) * 8, mfu)
    return replace(plan(), cluster_digest="this", predicted=predicted)


def test_a_run_is_held_against_peaks_and_the_sum_of_the_parts() -> None:
    against = yardstick(foretold(0.5, 0.8), "this")
    assert against.figures(500.0) == pytest.approx({"mfu": 0.25, "efficiency": 0.4})
    assert against.verdict(1000.0) == {"mfu": 0.5, "efficiency": 0.8, "efficiency_basis": "measured"}


def test_what_is_unknown_is_absent() -> None:
    against = yardstick(foretold(None, 0.8), "this")
    assert against.figures(500.0) == pytest.approx({"efficiency": 0.4})
    assert against.figures(None) == {}
    nothing = {"mfu": None, "efficiency": None, "efficiency_basis": None}
    assert against.verdict(None) == nothing
    assert yardstick(foretold(0.5, None), "this").verdict(500.0) == {**nothing, "mfu": 0.25}
    assert yardstick(foretold(0.5, 0.8), "another").verdict(500.0) == nothing, "the plan is of another cluster"
    assert yardstick(replace(plan(), cluster_digest="this"), "this").verdict(500.0) == nothing, "no prediction"
