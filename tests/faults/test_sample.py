"""One case of the fault matrix in every test run, by its seed; `make test-faults` tries all.

`HETCTL_FAULT_SEED` names another seed, `random` draws one: the usual one is fixed until the whole matrix has been run.
"""

from __future__ import annotations

import os
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
    asked = os.environ.get("HETCTL_FAULT_SEED", "11")
    seed = secrets.randbelow(1 << 31) if asked == "random" else int(asked)
    print(f"seed {seed}: python -m tests.faults --count 1 --seed {seed}")
    with stage(tmp_path) as on:
        for fault, name, victim in cases(1, random.Random(seed)):
            verdict = try_case(on, fault, name, victim)
            assert not verdict.problems, verdict
