"""A schedule is added by one registration: it is planned, simulated, refused where it must be, and trains."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.executable import check_executable
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import weigh
from hetctl.trainer.recipe import load_recipe
from hetctl.trainer.schedule import SCHEDULES
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe
from tests.trainer.parity import SHAPE, TOY_SCHEDULE, difference, recipe, reference, train_layout

SETS = [
    ("model.name", "llama-8b"),
    ("batch.global_batch", 16),
    ("batch.micro_batch_size", 1),
    ("parallelism.pipeline", 2),
    ("parallelism.schedule", TOY_SCHEDULE.name),
]
CLUSTER = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="known words"):
        load_recipe(None, SETS)


def test_a_registered_schedule_is_planned_and_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, TOY_SCHEDULE.name, TOY_SCHEDULE)
    found = weigh(CLUSTER, load_recipe(None, [*SETS, ("parallelism.forwards_ahead", [2, 1])]))
    assert found.plan.schedule == TOY_SCHEDULE.name
    assert TOY_SCHEDULE.reason in found.plan.reasons
    check_executable(found.plan)
    with pytest.raises(ConfigError, match=TOY_SCHEDULE.name):
        check_executable(found.plan, compiled=True)
    kinds = [s.kind for s in found.predictions[0].simulated.spans if s.stage == 0 and s.kind in "FBW"]
    assert "".join(kinds).startswith("FFBFBW")
    assert len(kinds) == 3 * 16


def test_a_registered_schedule_trains() -> None:
    layout = Layout(((0,), (1,)), (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 4),), schedule=TOY_SCHEDULE.name)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8)
    found = on_islands((1, 1), train_layout, layout, asked, SHAPE, "toy schedule", seconds=120)
    assert difference(found, reference(asked)) < 1e-10
