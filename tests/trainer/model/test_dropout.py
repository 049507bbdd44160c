"""What dropout leaves out follows from seed, step, sample, layer and projection alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetctl.trainer.model.adapters import Adapters
from hetctl.trainer.model.dropout import InputDropout, draws_of, of_layer
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES

LIKE = torch.empty(2, 40, 150, dtype=torch.float64)


def mask(share: float = 0.3, *, seed: int = 0, first: int = 0, layer: int = 0, name: str = "q_proj") -> Tensor:
    draws = of_layer(draws_of(torch.arange(first, first + 2), seed), layer)
    return InputDropout(share, name, low=0).mask(draws, LIKE)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_share_is_left_out_and_the_rest_makes_up_for_it(share: float) -> None:
    found = mask(share)
    assert float((found == 0).double().mean()) == pytest.approx(share, abs=0.02)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.06)
    assert len(found.unique()) == 2
    assert mask(0.0).eq(1).all()


def test_seeds_samples_layers_and_projections_leave_out_unlike_values() -> None:
    masks = [*mask(), *mask(first=8), *mask(seed=1), *mask(layer=1), *mask(name="v_proj")]
    masks += [masks[0].roll(1, 0), masks[0].roll(1, 1)]
    for one, other in itertools.combinations(masks, 2):
        assert float((one == other).double().mean()) == pytest.approx(0.3**2 + 0.7**2, abs=0.03)


@pytest.mark.parametrize(("low", "past"), [(0, 150), (75, 150), (50, 100), (3, 5)])
def test_parts_of_values_and_of_samples_are_those_of_the_whole(low: int, past: int) -> None:
    draws, whole = of_layer(draws_of(torch.arange(2), 0), 0), mask()
    part = InputDropout(0.3, "q_proj", low=low).mask(draws[1:], LIKE[1:, :, low:past])
    assert torch.equal(part, whole[1:, :, low:past])
    assert torch.equal(draws, of_layer(draws_of(torch.arange(2), 0), 0)), "nobody's draws are written to"


def test_without_draws_nothing_is_left_out() -> None:
    shape = replace(SHAPES["demo"], layers=2, adapters=Adapters(2, 2.0, ("q_proj", "down_proj"), dropout=0.5))
    torch.manual_seed(0)
    model, tokens = StageModel(shape, (0, 2)).double(), torch.arange(8)[None]
    plain = StageModel(replace(shape, adapters=replace(shape.adapters, dropout=0.0)), (0, 2)).double()
    plain.load_state_dict(model.state_dict())
    dropped = model(tokens, draws=draws_of(torch.zeros(1, dtype=torch.int64), 0))
    assert float((model(tokens) - dropped).detach().abs().max()) > 1e-6
    assert torch.equal(model(tokens), plain(tokens))
