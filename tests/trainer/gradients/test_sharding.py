"""What shards of a stage share out: all of it only where the rest would not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.plan import Plan, Predicted
from hetctl.comm.contract.units import GiB
from hetctl.trainer.gradients.layout import keeps_whole
from hetctl.trainer.ranks.groups import Place
from tests.layouts import Cut, Layout, Pipe, plan_of

PARAMETERS = 8 * 10**9  # two shards: 9 bytes of each all in shards, 12 with weights and gradients whole
HELD = {"weights": 2 * PARAMETERS, "gradients": 4 * PARAMETERS}


def plan(predicted_gib: int, memory_gib: list[int | None]) -> Plan:
    made = plan_of(Layout(((0, 1),), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 1),)), seq_len=8)
    limits = [None if m is None else m * GiB for m in memory_gib]
    ranks = tuple(replace(r, memory_bytes=m) for r, m in zip(made.ranks, limits, strict=True))
    predicted = Predicted("table", 1.0, 1.0, 0.0, 0.0, None, (predicted_gib * GiB,) * 2)
    return replace(made, ranks=ranks, predicted=predicted)


@pytest.mark.parametrize(
    ("memory", "whole"), [([140, 140], True), ([110, 110], False), ([140, 110], False), ([None, None], True)]
)
def test_weights_stay_whole_where_every_rank_of_the_stage_has_room(memory: list[int | None], whole: bool) -> None:
    made = plan(90, memory)
    assert [keeps_whole(made, Place.of(made, r), "auto", **HELD) for r in (0, 1)] == [whole] * 2


def test_the_recipe_may_insist() -> None:
    made = plan(90, [140, 140])
    assert keeps_whole(made, Place.of(made, 0), "optimizer", **HELD)
    assert not keeps_whole(made, Place.of(made, 0), "all", **HELD)


def test_what_the_plan_decided_holds() -> None:
    made = plan(90, [140, 140])
    (replica,) = made.replicas
    for whole in (True, False):
        stages = tuple(replace(s, whole=whole) for s in replica.stages)
        decided = replace(made, replicas=(replace(replica, stages=stages),))
        assert keeps_whole(decided, Place.of(decided, 0), "auto", **HELD) is whole
