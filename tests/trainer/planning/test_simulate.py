"""The simulator against formulas that hold exactly, and against what no schedule can beat."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.trainer.planning.simulate import PipelineTimes, StageTimes, TiedSum, least_seconds, simulate, step_seconds
from hetctl.trainer.schedule import SCHEDULES


def pipeline(times: list[tuple[float, float]], hop: float, count: int, schedule: str = "1f1b") -> PipelineTimes:
    p = len(times)
    stages = tuple(StageTimes(f, b) for f, b in times)
    return PipelineTimes(
        stages, (hop,) * (p - 1), (True,) * (p - 1), count, SCHEDULES[schedule].in_flight(p, count), (1,) * p
    )


def test_equal_stages_take_the_textbook_time() -> None:
    made = simulate([pipeline([(1.0, 2.0)] * 4, 0.0, 8)])
    assert made.step_time_s == pytest.approx((8 + 4 - 1) * 3.0)


def test_plain_1f1b_over_two_stages_loses_a_hop_a_micro_batch_and_eager_hides_it() -> None:
    plain = simulate([pipeline([(1.0, 2.0)] * 2, 0.25, 64)]).step_time_s
    eager = simulate([pipeline([(1.0, 2.0)] * 2, 0.25, 64, "eager-1f1b")]).step_time_s
    assert plain == pytest.approx(64 * 3.25 + 3.0, rel=0.01)
    assert eager == pytest.approx(64 * 3.0 + 3.0 + 2 * 0.25, rel=0.01)


def test_an_engine_that_transfers_between_its_actions_pays_for_them_on_both_ends() -> None:
    times = pipeline([(1.0, 2.0)] * 2, 0.25, 64, "eager-1f1b")
    blocking = simulate([replace(times, blocking=True)]).step_time_s
    assert blocking == pytest.approx(64 * (3.0 + 2 * 0.25) + 3.0, rel=0.01)  # out and back, and the fill
    assert simulate([replace(times, blocking=True, hops=(0.0,))]) == simulate([replace(times, hops=(0.0,))])


@pytest.mark.parametrize(("devices", "count"), [(2, 8), (4, 8), (8, 16)])
def test_split_and_interleaved_schedules_take_the_published_times(devices: int, count: int) -> None:
    def seconds(schedule: str, chunks: int) -> float:
        stages = (StageTimes(1.0 / chunks, 2.0 / chunks, weights_s=1.0 / chunks),) * (devices * chunks)
        nothing = (0.0,) * (len(stages) - 1)
        ahead = SCHEDULES["1f1b"].in_flight(len(stages), count)
        layers = (1,) * len(stages)
        times = PipelineTimes(stages, nothing, (False,) * len(nothing), count, ahead, layers, schedule, chunks)
        return simulate([times]).step_time_s

    assert seconds("1f1b", 1) == pytest.approx(3 * count + 3 * (devices - 1))
    assert seconds("zero-bubble", 1) == pytest.approx(3 * count + (devices - 1))  # (p - 1)(F + B - W)
    for chunks in (2, 4):
        assert seconds("interleaved", chunks) == pytest.approx(3 * count + 3 * (devices - 1) / chunks)


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 6)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(1, 12),
    st.sampled_from(("1f1b", "eager-1f1b")),
)
def test_no_step_beats_its_slowest_stage(
    times: list[tuple[float, float]], hop: float, count: int, schedule: str
) -> None:
    made = simulate([pipeline(times, hop, count, schedule)])
    fill = sum(f + b for f, b in times) + 2 * hop * (len(times) - 1)
    assert made.step_time_s >= max(fill, count * max(f + b for f, b in times)) - 1e-9
    done = [s for s in made.spans if s.kind in "FB"]
    assert len(done) == 2 * count * len(times)
    for stage in range(len(times)):
        mine = sorted((s.start_s, s.end_s) for s in done if s.stage == stage)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))


def test_what_comes_once_a_step_adds_up_over_a_devices_stages() -> None:
    """Sums and updates of interleaved stages are the device's own work, one after another."""
    stages = (StageTimes(1.0, 2.0, sync_s=0.5, update_s=0.25),) * 4
    bare = PipelineTimes(
        tuple(replace(s, sync_s=0.0, update_s=0.0) for s in stages),
        (0.0,) * 3, (False,) * 3, 4, SCHEDULES["interleaved"].in_flight(4, 4), (1,) * 4, "interleaved", 2,
    )  # fmt: skip
    times = replace(bare, stages=stages)
    made, base = simulate([times]), simulate([bare]).step_time_s
    updates = sorted((s.start_s, s.end_s) for s in made.spans if s.kind == "update" and s.stage in (0, 2))
    assert updates[0][1] == updates[1][0]
    # device 0's first stage is done last, and its second stage's sum is over by then
    assert made.step_time_s == pytest.approx(base + 0.5 + 2 * 0.25)
    assert step_seconds([times]) == pytest.approx(made.step_time_s)
    late = replace(times, stages=tuple(replace(s, sync_s=9.0) for s in stages))
    assert simulate([late]).step_time_s > base + 9.0 + 2 * 0.25, "a device's sums do not run at once"


def test_replicas_wait_for_each_other_before_gradients_are_summed() -> None:
    fast = PipelineTimes((StageTimes(1.0, 2.0, sync_s=0.5, update_s=0.25),), (), (), 2, (1,), (4,))
    slow = PipelineTimes((StageTimes(2.0, 4.0, sync_s=0.5, update_s=0.25),), (), (), 2, (1,), (4,))
    made = simulate([fast, slow])
    assert made.step_time_s == pytest.approx(12.0 + 0.5 + 0.25)
    mine = [s for s in made.spans if s.replica == 0 and s.stage == 0 and s.kind in ("F", "B", "W", "update")]
    assert sum(s.end_s - s.start_s for s in mine) == pytest.approx(6.25)


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 6), st.floats(0, 9)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(1, 12),
    st.sampled_from(("1f1b", "eager-1f1b", "gpipe")),
)
def test_no_step_takes_less_than_its_least_and_both_simulators_agree(
    times: list[tuple[float, float, float]], hop: float, count: int, schedule: str
) -> None:
    stages = tuple(StageTimes(f, b, sync_s=sums, update_s=0.5) for f, b, sums in times)
    made = replace(pipeline([(f, b) for f, b, _ in times], hop, count, schedule), stages=stages)
    seconds = simulate([made]).step_time_s
    assert least_seconds(made) <= seconds * (1 + 1e-12)
    assert step_seconds([made]) == pytest.approx(seconds)


def test_ends_that_hold_one_embedding_sum_its_gradient_after_the_last_backward() -> None:
    bare = pipeline([(1.0, 2.0)] * 3, 0.25, 8)
    tied = replace(bare, stages=tuple(replace(s, sync_s=0.5) for s in bare.stages), tied=TiedSum(4.0, True))
    alone = simulate([bare]).step_time_s
    assert simulate([tied]).step_time_s == pytest.approx(alone + 0.5 + 4.0)
    assert step_seconds([tied]) == pytest.approx(alone + 0.5 + 4.0)
    assert least_seconds(tied) <= alone + 0.5 + 4.0
    free = tied.without_bridges()
    assert simulate([free]).step_time_s == pytest.approx(simulate([replace(bare, hops=(0.0, 0.0))]).step_time_s + 0.5)
    assert replace(tied, tied=TiedSum(4.0)).without_bridges().tied.seconds == 4.0
