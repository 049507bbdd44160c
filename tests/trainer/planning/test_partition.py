"""Splits: the dynamic program against enumeration, the published rules, and their sums."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.planning import partition
from hetctl.trainer.planning.partition import (
    Splits,
    StageTable,
    best_split,
    fixed_split,
    holmes_layers,
    undominated,
    uniform_layers,
)
from tests.trainer.planning.brute import compositions

times = st.one_of(st.floats(0.01, 10), st.just(math.inf))


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[StageTable], int]:
    layers, rows = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        beat = np.array([draw(st.lists(times, min_size=layers + 1, max_size=layers + 1)) for _ in range(rows)])
        end = np.where(np.isfinite(beat), draw(st.floats(0, 5)), np.inf)
        found.append(StageTable(beat, end))
    return found, layers


@given(stages(), st.integers(1, 5), st.floats(0, 20))
def test_the_split_is_the_best_of_all(instance: tuple[list[StageTable], int], count: int, floor: float) -> None:
    tables, layers = instance
    best = math.inf
    for split in compositions(layers, len(tables)):
        for rows in product(*[range(len(t.beat)) for t in tables]):
            beats = [float(t.beat[r, k]) for t, r, k in zip(tables, rows, split, strict=True)]
            if math.inf not in beats:
                ends = max(float(t.end[r, k]) for t, r, k in zip(tables, rows, split, strict=True))
                best = min(best, sum(beats) + max(floor, (count - 1) * max(beats)) + ends)
    found = best_split(tables, layers, micro_batches=count, floor=floor)
    assert (math.inf if found is None else found.seconds) == pytest.approx(best)
    if found is not None:
        assert sum(found.layers) == layers
        again = fixed_split(tables, found.layers, micro_batches=count, floor=floor)
        assert again is not None
        assert again.seconds == pytest.approx(best)


def test_a_long_way_back_makes_early_stages_turn_slower() -> None:
    """Two in flight: the first stage's next forward waits for its backward, two beats and the transfers later."""
    beat = np.array([[0.0, 1.0, 2.0]])
    first, last = StageTable(beat, 0 * beat, in_flight=2, trip_s=4.0), StageTable(beat, 0 * beat)
    found = best_split([first, last], 2, micro_batches=11)
    assert found is not None
    assert found.seconds == pytest.approx(2.0 + 10 * (2.0 + 4.0) / 2)


def test_ends_are_waited_for_by_all() -> None:
    """What is fast in a micro-batch and slow at the end loses where the other has no such end."""
    fast, slow = [0.0, 1.0, 2.0], [0.0, 1.2, 2.4]
    table = StageTable(np.array([fast, slow]), np.array([[0.0, 5.0, 5.0], [0.0, 0.1, 0.1]]))
    found = best_split([table], 2, micro_batches=2)
    assert found is not None
    assert (found.rows, found.seconds) == ((1,), pytest.approx(2.4 * 2 + 0.1))


def test_nothing_slower_than_the_bound_is_returned() -> None:
    table = StageTable(np.array([[0.0, 1.0, 2.0]]), np.zeros((1, 3)))
    assert best_split([table, table], 2, micro_batches=1, bound=2.0) is None
    found = best_split([table, table], 2, micro_batches=1, bound=2.1)
    assert found is not None
    assert found.layers == (1, 1)


def test_holmes_and_uniform() -> None:
    assert holmes_layers((197, 160), 30) == (16, 14)
    assert holmes_layers((197, 160), 48) == (26, 22)
    assert holmes_layers((197, 160), 30, alpha=1.05) == (17, 13)
    assert holmes_layers((1, 1), 30) == (15, 15)
    assert uniform_layers(3, 8) == (3, 3, 2)


def test_holmes_rule_with_an_alpha_beyond_all_numbers() -> None:
    assert holmes_layers([1e14, 1e14], 8, alpha=1e308) == (8, 0)  # no stage may hold none: the caller refuses it


def test_splits_serve_any_number_of_micro_batches_and_few_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, layers, worked_out = (*range(2, 40), 512), np.arange(17.0), []
    paces = (1.0, 1.7, 2.3, 4.1)
    tables = [StageTable(np.array([pace * (0.1 + layers)]), np.zeros((1, 17)), in_flight=2) for pace in paces]
    every, each = Splits(tables, 16), partition._Capped._least_sum

    def counted(self: partition._Capped, threshold: float) -> tuple[int, ...] | None:
        worked_out.append(threshold)
        return each(self, threshold)

    monkeypatch.setattr(partition._Capped, "_least_sum", counted)
    alone = [best_split(tables, 16, micro_batches=m) for m in counts]
    asked_alone = len(worked_out)
    worked_out.clear()
    assert [every.best(m) for m in counts] == alone
    assert 0 < len(worked_out) < asked_alone / 4


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=8))
def test_what_is_left_out_another_row_beats(rows: list[list[int]]) -> None:
    kept = undominated(np.array(rows, dtype=np.float64))
    for i, row in enumerate(rows):
        no_worse = [j for j, other in enumerate(rows) if all(a <= b for a, b in zip(other, row, strict=True))]
        assert kept[i] == all(j == i or (rows[j] == row and j > i) for j in no_worse)
