"""What the planner counts where a reference's forward comes before each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.costs import LayerCosts, Mode, Seconds
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.recipe import DpoSection, LoraSection
from tests.trainer.planning.test_adapters import asked


def weighed(beta: float | None, where: str = "h100:1,mi300x:1", **pins: Any) -> Planning:
    recipe = replace(asked("llama-8b", LoraSection(16), **pins), dpo=DpoSection(beta))
    return weigh(describe_cluster(parse_spec(where, CLASSES), CLASSES), recipe)


@pytest.mark.parametrize("mode", [Mode(), Mode("full"), Mode("selective"), Mode(activations=True)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_forward_of_the_base_comes_once_more_and_backward_stays(mode: Mode, tensor: int) -> None:
    adapted, rates = asked("llama-8b", LoraSection(16)).shape(), weighed(None).problem.pools[0].rates
    plain, referred = (LayerCosts(adapted, 2048, referred=referred) for referred in (False, True))
    base = LayerCosts(SHAPES["llama-8b"], 2048).block(rates, 2, tensor=tensor).forward
    alone, both = (costs.block(rates, 2, tensor=tensor, mode=mode) for costs in (plain, referred))
    assert both.forward == pytest.approx(alone.forward + base)
    assert both.backward == alone.backward
    for end in ("embedding", "head"):
        once, twice = (getattr(costs, end)(rates, 2, tensor=tensor) for costs in (plain, referred))
        assert twice == Seconds(2 * once.forward, once.backward)
    assert referred.hop_bytes(2) == 1.5 * plain.hop_bytes(2) == 1.5 * plain.boundary_bytes(2)


@pytest.mark.parametrize("pins", [{"pipeline": 1}, {"pipeline": 2, "schedule": "1f1b"}])
def test_a_step_takes_longer_by_it_and_the_memory_is_the_same(pins: dict[str, Any]) -> None:
    """A frozen model's backward is little more than its forward: a third forward is nearly half as much again."""
    without, referred = (weighed(beta, tensor=1, **pins) for beta in (None, 0.1))
    assert 1.3 < referred.plan.predicted.step_time_s / without.plan.predicted.step_time_s < 1.6
    assert referred.plan.predicted.memory_bytes == without.plan.predicted.memory_bytes
    assert any("the reference, makes a forward" in note for note in referred.problem.notes)
    assert not any("reference" in note for note in without.problem.notes)
