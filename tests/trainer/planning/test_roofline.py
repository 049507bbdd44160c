"""What a sustained figure says of shapes that it was not measured on."""

from dataclasses import replace

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.planning.costs import LayerCosts, ValueBytes
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.pools import Rates, read_pools


def rates(name: str, speeds: dict[str, float] | None = None) -> Rates:
    [pool] = read_pools(describe_cluster(parse_spec(f"{name}:1", CLASSES), CLASSES), speeds=speeds)
    return replace(pool.rates, launch_s=0.0)


def tflops(shape: ModelShape, seq_len: int, of: Rates) -> float:
    """Of forward and backward, as plans count FLOPs."""
    costs = LayerCosts(shape, seq_len, ValueBytes())
    seconds = shape.layers * costs.block(of, 1).both + costs.head(of, 1).both
    return shape.token_flops(seq_len) * seq_len / seconds / 1e12


@pytest.mark.parametrize("name", ["a100", "h200", "mi325x", "v100"])
def test_the_reference_reaches_the_sustained_figure(name: str) -> None:
    assert tflops(SHAPES["llama-8b"], 4096, rates(name)) == pytest.approx(CLASSES[name].sustained_tflops)


def test_small_models_and_long_samples_reach_less_and_large_ones_more() -> None:
    a100 = rates("a100")
    small, middle, large = (tflops(SHAPES[n], 4096, a100) for n in ("llama-160m", "llama-8b", "llama-70b"))
    assert small < 0.75 * middle < middle < large
    assert tflops(SHAPES["llama-8b"], 65536, a100) < 0.75 * middle


def test_a_speed_given_by_hand_is_of_the_very_model() -> None:
    assert tflops(SHAPES["llama-160m"], 32768, rates("a100", {"a100": 100.0})) == pytest.approx(100.0)


def test_tensor_groups_repeat_norms() -> None:
    costs, h200 = LayerCosts(SHAPES["llama-8b"], 4096, ValueBytes()), rates("h200")
    fast = replace(h200, native_bytes_per_s=1e30)
    assert costs.block(fast, 1).forward / 8 < costs.block(fast, 1, tensor=8).forward < costs.block(fast, 1).forward / 5
