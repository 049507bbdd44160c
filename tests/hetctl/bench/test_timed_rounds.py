"""How long layers are timed: a device at its power limit runs now faster, now slower."""

from __future__ import annotations

import time

import pytest
import torch

from hetctl.trainer.bench import ops

SWING_S = (0.92, 0.92, 1.04)  # of what a pass takes, for 0.4 s each in turn: as an H200 did at 680 W


def test_a_device_is_timed_over_several_swings_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def once() -> ops.Reading:
        nonlocal now
        seconds = 0.06 * SWING_S[int(now / 0.4) % 3]
        now += seconds
        return lambda: (seconds / 3, seconds * 2 / 3)

    monkeypatch.setattr(ops, "has_streams", lambda device: True)
    monkeypatch.setattr(ops, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for warm_s in (0.5, 0.9, 1.2, 1.5):  # wherever in the swing timing begins
        forward, backward = ops._typical(once, torch.device("cpu"), warm_s)
        assert forward + backward == pytest.approx(0.06 * 0.92, rel=0.01)
