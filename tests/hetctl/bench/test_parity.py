"""Parity is a difference of every step's figures: a missing step or one that is not finite is no agreement."""

from __future__ import annotations

import math

import pytest

from hetctl.bench import parity
from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.console import Sink
from hetctl.trainer.planning.hardware import CLASSES


@pytest.mark.parametrize(
    ("found", "wanted", "worst"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0], [1.0, 2.0], math.inf),
        ([1.0, None], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, 2.0], 0.0),
    ],
)
def test_the_worst_deviation(found: list[float | None], wanted: list[float | None], worst: float) -> None:
    assert parity._worst(found, wanted) == worst


def test_more_islands_than_layers_are_refused_before_anything_starts() -> None:
    spec = parse_spec(",".join(["cpu:1"] * 9), CLASSES)
    cluster = label_machine(spec, Machine("here", "gloo", (1 << 30,) * 9, "cpu"))
    with pytest.raises(ConfigError, match="9 pipeline stages"):
        parity.compare(cluster, "pipeline", steps=1, sink=Sink())
