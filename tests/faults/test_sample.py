"""One random case of the fault matrix in every test run; its seed is in the failure. `make test-faults` tries all."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from tests.faults.__main__ import cases
from tests.faults.drive import stage, try_case
from tests.rigs import netns

WHY_NOT = netns.unavailable()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_random_fault(tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 31)
    print(f"seed {seed}: python -m tests.faults --count 1 --seed {seed}")
    with stage(tmp_path) as on:
        for fault, name, victim in cases(1, random.Random(seed)):
            verdict = try_case(on, fault, name, victim)
            assert not verdict.problems, verdict
