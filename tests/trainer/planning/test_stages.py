"""What collectives cost a stage: beside computation, and in rings across hosts."""

from dataclasses import replace

import pytest

from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.costs import OVERLAP_COST, PLAIN, LayerCosts, ValueBytes
from hetctl.trainer.planning.pools import RING_REACHED, Rates
from hetctl.trainer.planning.stages import MemoryChoice, StagePlace, StageSite, coefficients

RATES = Rates(1e14, 1e12, 1e11, 1e10, 1e10, 0.0, 80 << 30, 0)
COSTS = LayerCosts(SHAPES["llama-8b"], 2048, ValueBytes())
MIDDLE = StagePlace(False, False, 2, 1)


def forward(rates: Rates, shards: int, *, cut_for_certain: bool = True) -> float:
    costs = replace(COSTS, overlap_cost=OVERLAP_COST if cut_for_certain else 0.0)
    site = StageSite(rates, 16, per_host=8)
    return coefficients(costs, site, MIDDLE, MemoryChoice(PLAIN, shards)).forward.each


def test_gathering_weights_takes_a_share_from_the_computation_that_hides_it() -> None:
    alone, bytes_ = forward(RATES, 1), 2 * COSTS.block_parameters
    gather = 7 / 8 * bytes_ / RATES.native_bytes_per_s
    assert gather < alone
    assert forward(RATES, 8) == pytest.approx(alone + OVERLAP_COST * gather)
    assert forward(RATES, 8, cut_for_certain=False) == alone
    slow = replace(RATES, native_bytes_per_s=RATES.native_bytes_per_s / 100)
    assert forward(slow, 8) == pytest.approx(100 * gather + OVERLAP_COST * alone)


def test_rings_across_hosts_reach_less_than_their_ports_give_messages() -> None:
    sums = [coefficients(COSTS, StageSite(RATES, 2, per_host=n), MIDDLE, MemoryChoice(PLAIN, 1)).sums for n in (1, 2)]
    across, inside = (line.each for line in sums)
    there_and_back = 2 * 4 * COSTS.block_parameters / 2
    assert inside == pytest.approx(there_and_back / RATES.native_bytes_per_s)
    assert across == pytest.approx(there_and_back / (RING_REACHED * RATES.nic_bytes_per_s))
