"""Measured paces: who is slower than its like, and counts that make the slowest replica as fast as can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.plan import Plan, Predicted
from hetctl.trainer.pace import rebalanced, stragglers, why_fixed, yardstick
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
