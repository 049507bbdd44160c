"""Where a step's time went: waiting for unfinished work is bubble, for finished work bridge or native."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetctl.trainer.loop.profiling import sent_before_backward_ended
from hetctl.trainer.ranks.timeline import Span, StepTimes, Timeline, on_one_clock, replica_spread, shares, step_times


def test_a_wait_is_split_at_the_moment_the_peer_was_ready() -> None:
    first = [Span("F", 0.0, 4.0, 0), Span("wait-B", 4.0, 10.0, 0, (1,), True)]
    second = [Span("wait-F", 0.0, 5.0, 0, (0,), True), Span("F", 5.0, 7.0, 0), Span("B", 7.0, 9.0, 0)]
    found = shares([[first], [second]])
    # of 2 x 10 s: compute 4 + 4, bridge 1 (5 - 4) + 1 (10 - 9), bubble 5 + 4 and the last second of the second
    assert found.compute == pytest.approx(8 / 20)
    assert found.bridge == pytest.approx(2 / 20)
    assert found.bubble == pytest.approx(10 / 20)
    assert found.native == 0


def test_shares_of_some_ranks_are_of_their_time_alone() -> None:
    first = [Span("F", 0.0, 4.0, 0), Span("wait-B", 4.0, 10.0, 0, (1,), True)]
    second = [Span("wait-F", 0.0, 5.0, 0, (0,), True), Span("F", 5.0, 7.0, 0), Span("B", 7.0, 9.0, 0)]
    found = shares([[first], [second]], [1])
    assert (found.compute, found.bridge, found.bubble) == pytest.approx((0.4, 0.1, 0.5))


def test_a_rank_alone_knows_what_it_waited_for_but_not_why() -> None:
    step = [Span("wait-F", 1.0, 2.0, 0, (1,), True), Span("F", 2.0, 5.0, 0), Span("weights", 2.0, 2.5, 0, (1,), True)]
    step += [Span("sync", 5.0, 5.25, 0, (2,), False), Span("world", 5.25, 7.0, 0, (1, 2), True)]
    step += [Span("update", 7.5, 9.0)]
    # of 8 s: 3 less 0.5 in the forward, 1 and those 0.5 for the bridge, 1.5 to update; the rest is not the bridge's
    assert step_times(step) == StepTimes(step=8.0, compute=2.5, bridge_wait=1.5, update=1.5, other_wait=2.5)


def test_collectives_wait_for_the_last_to_arrive() -> None:
    early = [Span("F", 0.0, 1.0, 0), Span("sync", 1.0, 6.0, 0, (1,), False)]
    late = [Span("F", 0.0, 4.0, 0), Span("sync", 4.0, 6.0, 0, (0,), False)]
    found = shares([[early], [late]])
    assert found.bubble == pytest.approx(3 / 12)
    assert found.native == pytest.approx(4 / 12)


def test_hosts_clocks_are_brought_together_where_all_know_the_figures() -> None:
    first = [Span("F", 0.0, 4.0, 0), Span("world", 9.0, 10.0, 0, (1, 2))]
    second = [Span("wait-F", 1.0, 5.0, 0, (0,), True), Span("F", 5.0, 9.0, 0), Span("world", 9.0, 10.0, 0, (0, 2))]
    there = [[replace(s, start=s.start + 5000, end=s.end + 5000) for s in own] for own in (first, second)]
    found = on_one_clock([[first], [there[0]], [there[1]]], ["a", "b", "b"])
    assert found == [[first], [first], [second]]
    assert on_one_clock([[first], [second]], ["a", "a"]) == [[first], [second]]
    assert on_one_clock([[], []], ["a", "b"]) == [[], []]
    assert shares(on_one_clock([[first], [there[1]]], ["a", "b"])) == shares([[first], [second]])


def test_replicas_are_as_far_apart_as_their_last_ranks() -> None:
    early = [Span("F", 0.0, 4.0, 0), Span("B", 4.0, 8.0, 0), Span("sync", 8.0, 10.0, 0)]
    later = [Span("F", 0.0, 4.0, 0), Span("B", 4.0, 9.0, 0), Span("sync", 9.0, 10.0, 0)]
    assert replica_spread([[early], [later]], [0, 1]) == pytest.approx(0.1)
    assert replica_spread([[early], [later]], [0, 0]) is None
    other_clock = [Span(s.kind, s.start + 100, s.end + 100, 0) for s in (*later, Span("world", 10.0, 11.0))]
    assert replica_spread([[[*early, Span("world", 10.0, 11.0)]], [other_clock]], [0, 1]) == pytest.approx(1 / 11)
    assert replica_spread([[later], [early], [later], []], [0, 0, 1, None]) is None  # no step of all ranks
    assert replica_spread([[later], [early], [later], [[]]], [0, 0, 1, None]) == 0


def test_waiting_for_weights_is_a_part_of_the_forward_that_is_no_computing() -> None:
    first = [Span("F", 0.0, 4.0, 0), Span("weights", 1.0, 2.5, 7, (1,), True), Span("B", 4.0, 10.0, 0)]
    found = shares([[first]])
    assert (found.compute, found.bridge, found.bubble) == pytest.approx((8.5 / 10, 1.5 / 10, 0.0))


def test_spans_stand_in_the_order_in_which_they_begin() -> None:
    timeline = Timeline(torch.device("cpu"))
    with timeline.span("F"), timeline.span("weights", bridged=True):
        pass
    timeline.end_step()
    outer, inner = timeline.steps[-1]
    assert (outer.kind, inner.kind) == ("F", "weights")
    assert outer.start <= inner.start <= inner.end <= outer.end


def test_no_spans_are_no_shares() -> None:
    assert shares([]).compute == 0


def test_what_was_sent_before_backward_ended() -> None:
    spans = [Span("F", 0.0, 1.0), Span("B", 1.0, 2.0), Span("sync", 2.0, 3.0)]
    samples = [(0.5, 1000), (1.0, 1000), (1.5, 1060), (2.5, 1180), (3.0, 1200)]
    assert sent_before_backward_ended(spans, samples) == pytest.approx(0.6)  # 60 and half of the next 120, of 200
    assert sent_before_backward_ended(spans[:1], samples) is None
    assert sent_before_backward_ended(spans, [(0.0, 7), (3.0, 7)]) is None
