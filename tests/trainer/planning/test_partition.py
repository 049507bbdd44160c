"""Splits: the dynamic program against enumeration, the published rules, and their sums."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.planning.partition import StageTable, best_split, fixed_split, holmes_layers, uniform_layers
from tests.trainer.planning.brute import compositions

times = st.one_of(st.floats(0.01, 10), st.just(math.inf))


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[StageTable], int]:
    layers, rows = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        beat = np.array([draw(st.lists(times, min_size=layers + 1, max_size=layers + 1)) for _ in range(rows)])
        end = np.where(np.isfinite(beat), draw(st.floats(0, 5)), np.inf)
        found.append(StageTable(beat, end, draw(st.floats(0.5, 2)), draw(st.floats(0, 1))))
    return found, layers


@given(stages(), st.integers(1, 5), st.floats(0, 20))
def test_the_split_is_the_best_of_all(instance: tuple[list[StageTable], int], count: int, floor: float) -> None:
    tables, layers = instance
    best = math.inf
    for split in compositions(layers, len(tables)):
        for rows in product(*[range(len(t.beat)) for t in tables]):
            beats = [float(t.beat[r, k]) for t, r, k in zip(tables, rows, split, strict=True)]
            if math.inf not in beats:
                loads = [
                    (count - 1) * max(b, t.ratio * b + t.wait) + float(t.end[r, k])
                    for b, t, r, k in zip(beats, tables, rows, split, strict=True)
                ]
                best = min(best, sum(beats) + max(floor, *loads))
    found = best_split(tables, layers, micro_batches=count, floor=floor)
    assert (math.inf if found is None else found.seconds) == pytest.approx(best)
    if found is not None:
        assert sum(found.layers) == layers
        again = fixed_split(tables, found.layers, micro_batches=count, floor=floor)
        assert again is not None
        assert again.seconds == pytest.approx(best)


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
