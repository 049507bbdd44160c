"""Strangers of all kinds at all ports of a run, from beside its hosts: it ends well, with the losses of a quiet one."""

from __future__ import annotations

import pytest

from tests.faults.drive import stage
from tests.faults.strangers import KINDS, SETTINGS, STEPS, Attack, attack, recordings
from tests.rigs import netns

WHY_NOT = netns.unavailable()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_strangers_end_no_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with stage(tmp_path_factory.mktemp("s") / "r", steps=STEPS, settings=SETTINGS, others=1) as on:
        recorded = recordings(on)
        for kind in KINDS:
            made = attack(on, Attack(kind, "", ""), recorded, inside=False)
            assert made.tried
            assert not made.problems, made
