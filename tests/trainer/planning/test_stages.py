"""What a stage costs: collectives beside computation and in rings across hosts, and what is computed again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.model.split_backward import WeightGradients
from hetctl.trainer.planning.costs import OVERLAP_COST, PLAIN, LayerCosts, Mode, ValueBytes
from hetctl.trainer.planning.pools import RING_REACHED, Rates
from hetctl.trainer.planning.stages import MemoryChoice, StagePlace, StageSite, SyncRate, coefficients

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


@pytest.mark.parametrize(("transport", "rate", "cost"), [("shm", 1e12, 0.25), ("rdma", 1e9, 0.25), ("tcp", 9e9, 1.0)])
def test_what_backward_hides_of_a_bridges_sums_costs_it_part_of_their_time(
    transport: str, rate: float, cost: float
) -> None:
    layers, site, choice = 8, StageSite(RATES, 1), MemoryChoice(PLAIN, 1)
    assert TRANSPORTS[transport].taken(rate) == cost
    hidden = (1 - cost, 1 - TRANSPORTS["native"].taken(rate))
    across, native = (
        coefficients(COSTS, site, replace(MIDDLE, sync=SyncRate(1e12, 1e12, 1e12, share), replicas=2), choice)
        for share in hidden
    )
    inside = coefficients(COSTS, StageSite(RATES, 2, per_host=2), MIDDLE, choice)
    for found, paid in ((across, cost), (native, 0.0), (inside, 0.0)):
        sums = found.sums.at(layers)
        assert 0 < sums < layers * found.backward.each
        left = sums / layers
        assert found.exposed(layers) == pytest.approx(left + paid * (sums - left))


def test_weights_that_come_back_hide_behind_the_next_forward() -> None:
    """Where replicas share out the update: a third of what they exchange (bf16 back for fp32 there)."""
    costs = replace(COSTS, value_bytes=replace(COSTS.value_bytes, over_replicas=True))
    layers, site = 8, StageSite(RATES, 1)
    slow = coefficients(
        costs, site, replace(MIDDLE, sync=SyncRate(1e9, 1e9, 1e9, 1.0), replicas=2), MemoryChoice(PLAIN, 1)
    )
    sums, passes = slow.sums.at(layers), [layers * p.each for p in (slow.backward, slow.forward)]
    assert 2 / 3 * sums > passes[0]  # both hide all they can
    assert sums / 3 > passes[1]
    assert slow.exposed(layers) == pytest.approx(sums - sum(passes))


def test_passes_whose_kernels_are_launched_ahead_lose_nothing_to_sums_beside_them() -> None:
    site, layers = StageSite(RATES, 1), 8
    passes = coefficients(COSTS, site, MIDDLE, MemoryChoice(PLAIN, 1))
    rate = SyncRate(1e12, 1e12, 1e12, 0.5)
    exposed = {}
    for times in (0.5, 1.0, 1.0 + 1e-3, 9.0):  # of the pass
        place = replace(MIDDLE, sync=rate._replace(launching_s=times * passes.backward.each), replicas=2)
        found = coefficients(COSTS, site, place, MemoryChoice(PLAIN, 1))
        exposed[times] = found.exposed(layers)
    left = found.sums.at(layers) / layers
    assert exposed[0.5] == exposed[1.0] == pytest.approx(left)
    assert left < exposed[1.0 + 1e-3] < exposed[9.0] == pytest.approx(left + (found.sums.at(layers) - left) / 2)


def test_a_slow_network_leaves_a_ranks_threads_time_to_launch() -> None:
    taken = [TRANSPORTS["tcp"].taken(rate) for rate in (1e8, 1e9, 3e9)]
    assert taken == pytest.approx([1 / 60, 1 / 6, 1 / 2])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt", "gemma2", "olmo2"])
def test_full_recomputation_is_taken_to_make_again_what_torch_makes_again(family: str, split: bool) -> None:
    shape = ModelShape("tiny", family, layers=3, hidden=32, heads=4, kv_heads=4, intermediate=96, vocab=48)
    tokens, made = 16, {}
    for recompute in ("none", "full"):
        model = StageModel(shape, (1, 2), recompute=recompute)
        deferred = WeightGradients(lambda parameter: None)
        if split:
            model.defer_weight_gradients(deferred)
        block = next(iter(model.layers.values()))
        x = torch.randn(1, tokens, shape.hidden, requires_grad=True)
        tables = model.rotary(x, model.is_local(1))
        with FlopCounterMode(display=False) as forward:
            y = block(x, *tables)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
            deferred.run(deferred.take())
        made[recompute] = forward.get_total_flops(), backward.get_total_flops()
    spared = made["none"][0] - (made["full"][1] - made["none"][1])

    costs = LayerCosts(shape, tokens, ValueBytes())
    plain, full = (costs.block(RATES, 1, mode=Mode(r)) for r in ("none", "full"))
    predicted = (plain.forward - (full.backward - plain.backward)) * RATES.flops_per_s
    assert predicted == pytest.approx(spared, abs=1)
    assert (spared == 0) is (family in ("gemma2", "olmo2"))
