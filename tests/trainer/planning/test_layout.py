"""Layouts given by hand: priced as the search prices its own, under what another engine does otherwise."""

from dataclasses import replace

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.layout import (
    Engine,
    Layout,
    ReplicaLayout,
    StageLayout,
    candidate_of,
    layout_of,
    predict_layout,
)
from hetctl.trainer.planning.predict import Prediction
from hetctl.trainer.planning.problem import Problem, read_problem
from hetctl.trainer.planning.reschedule import rescheduled
from hetctl.trainer.planning.search import Search
from hetctl.trainer.recipe import load_recipe
from hetctl.trainer.schedule import SCHEDULES


def problem(spec: str, samples: int = 64) -> Problem:
    sizes = [("model.name", "llama-8b"), ("model.seq_len", 2048), ("batch.global_batch", samples)]
    return read_problem(describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, sizes))


def two_stages(first: int = 17, width: int = 8, pools: tuple[str, str] = ("h200", "mi325x")) -> Layout:
    stages = (StageLayout(pools[0], first, width), StageLayout(pools[1], 32 - first, width))
    return Layout((ReplicaLayout(stages, 8, 8),))


@pytest.mark.parametrize("spec", ["h200:8,mi325x:8", "h200:16", "h200:2,mi325x:2@0.5", "a100:4,v100:8"])
def test_what_the_search_found_costs_the_same_when_it_is_given(spec: str) -> None:
    asked = problem(spec)
    for candidate in Search(asked, keep=4).run().candidates:
        if len({c.mode for p in candidate.pipelines for c in p.choices}) == 1:  # a layout says one for all stages
            given = layout_of(candidate)
            assert given.samples == asked.samples
            assert predict_layout(asked, given).seconds == pytest.approx(Prediction(candidate).seconds, rel=1e-6)


def test_interleaved_chunks_are_those_that_the_planner_makes() -> None:
    asked, given = (
        problem("h200:2x8"),
        replace(two_stages(16, pools=("h200", "h200")), schedule="interleaved", chunks=2),
    )
    plain = candidate_of(asked, replace(given, schedule="1f1b", chunks=1))
    [ours] = rescheduled(asked, plain, replace(SCHEDULES["interleaved"], chunks=(2,)))
    assert predict_layout(asked, given).seconds == pytest.approx(Prediction(ours).seconds)


def test_other_engines_wait_for_what_ours_does_beside_computation() -> None:
    asked = problem("h200:1x8/ib400,mi325x:1x8/roce400;10GbE")
    ours = predict_layout(asked, two_stages()).seconds
    assert predict_layout(asked, two_stages(), Engine(blocking_transfers=True)).seconds > 1.1 * ours
    alone = Layout((ReplicaLayout((StageLayout("h200", 32, 8),), 8, 8),))
    late = predict_layout(problem("h200:8"), alone, Engine(exposed_sums=True)).seconds
    assert late > predict_layout(problem("h200:8"), alone).seconds


def test_memory_that_a_layout_lacks_is_known() -> None:
    assert predict_layout(problem("h200:8,mi325x:8"), two_stages()).fits
    small = problem("h200:8~40GiB,mi325x:8")
    assert not predict_layout(small, two_stages()).fits


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (two_stages(16, pools=("h200", "h100")), "'h100' is no pool here"),
        (Layout((ReplicaLayout((StageLayout("h200", 31, 8),), 8, 8),)), "add up to 31, not to 32"),
        (two_stages(width=9), "asks for 9 of the 8 devices of h200"),
        (replace(two_stages(), schedule="2f2b"), "'2f2b' is no schedule"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: Layout, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        predict_layout(problem("h200:8,mi325x:8"), layout)


def test_a_class_that_two_islands_have_must_be_named_with_its_island() -> None:
    asked = problem("h200:8,h200:8")
    with pytest.raises(ConfigError, match="several pools") as caught:
        predict_layout(asked, two_stages(pools=("h200", "h200")))
    names = str(caught.value.hint).split(", ")
    assert predict_layout(asked, two_stages(pools=(names[0], names[1]))).seconds > 0
