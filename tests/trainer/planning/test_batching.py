"""Samples shared among unequal replicas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.planning.batching import balance, divisors, largest_remainder
from tests.trainer.planning.brute import compositions


class Table:
    """Replicas whose times are listed: entry [replica][share]."""

    def __init__(self, times: list[list[float]], speeds: list[float] | None = None) -> None:
        self.times, self.speeds = times, speeds

    def seconds(self, replica: int, part: int) -> float:
        return self.times[replica][part] if part < len(self.times[replica]) else math.inf

    def bound(self, replica: int, part: int, limit: float) -> float:
        return 0.5 * self.seconds(replica, part)

    def faster(self, replica: int, part: int, limit: float) -> bool:
        return self.seconds(replica, part) < limit

    def most(self, replica: int, limit: float) -> int:
        return len(self.times[replica]) if self.speeds is None else int(min(limit * self.speeds[replica] + 1e-9, 99))


def least(table: Table, total: int) -> float:
    return min(
        (max(table.seconds(i, s) for i, s in enumerate(c)) for c in compositions(total, len(table.times))),
        default=math.inf,
    )


@given(st.integers(1, 9), st.lists(st.lists(st.floats(0.1, 9), min_size=10, max_size=10), min_size=1, max_size=3))
def test_tabulated_is_the_best_of_all(total: int, times: list[list[float]]) -> None:
    table = Table(times)
    found = balance(total, [1.0] * len(times), table)
    assert (math.inf if found is None else found[1]) == least(table, total)
    if found is not None:
        assert sum(found[0]) == total


@given(
    st.integers(2, 40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_intervals_are_the_best_of_all(total: int, kinds: list[tuple[int, int, int]]) -> None:
    """Replicas of unequal speed and width, with a least share that fits."""
    times = [
        [math.inf if s < low else -(-s // width) * width / speed for s in range(total + 1)]
        for speed, width, low in kinds
    ]
    table = Table(times, [float(speed) for speed, _, _ in kinds])
    found = balance(total, [float(k[0]) for k in kinds], table, tabulate=False)
    expected = least(table, total)
    if max(low for _, _, low in kinds) == 1:
        assert (math.inf if found is None else found[1]) == pytest.approx(expected)
    elif found is not None:
        assert found[1] >= expected
        assert sum(found[0]) == total


class Counted(Table):
    """The same, and how often it was asked."""

    asked = 0

    def faster(self, replica: int, part: int, limit: float) -> bool:
        self.asked += 1
        return super().faster(replica, part, limit)

    def most(self, replica: int, limit: float) -> int:
        return len(self.times[replica]) - 1


def shared(speeds: list[float], tolerance: float) -> tuple[float, int]:
    """(the slowest replica's time, questions asked) for 2,000 samples."""
    table = Counted([[s / speed for s in range(2001)] for speed in speeds])
    found = balance(2000, [1.0] * len(speeds), table, tolerance=tolerance)
    assert found is not None
    assert sum(found[0]) == 2000
    return found[1], table.asked


@given(st.lists(st.floats(1, 9), min_size=2, max_size=4), st.sampled_from((0.0, 0.005, 0.02)))
def test_a_tolerance_is_kept(speeds: list[float], tolerance: float) -> None:
    least_time = 2000 / sum(speeds)
    assert shared(speeds, tolerance)[0] <= least_time * (1 + 2 * tolerance) + max(1 / s for s in speeds)


def test_a_tolerance_asks_less() -> None:
    assert shared([5.0, 1.5, 2.2, 7.0], 0.01)[1] < shared([5.0, 1.5, 2.2, 7.0], 0.0)[1] / 2


def test_largest_remainder() -> None:
    assert largest_remainder(128, (70, 58)) == (70, 58)
    assert largest_remainder(10, (1, 1, 1)) == (4, 3, 3)
    assert largest_remainder(5, (1000, 1), least=1) == (4, 1)


@given(st.integers(1, 200), st.lists(st.floats(0.1, 100), min_size=1, max_size=5))
def test_remainders_add_up(total: int, weights: list[float]) -> None:
    if total >= len(weights):
        shares = largest_remainder(total, weights, least=1)
        assert sum(shares) == total
        assert min(shares) >= 1


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
