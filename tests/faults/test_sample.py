"""One random case of the fault matrix in every run of all tests; `make test-faults` tries all.

The seed is printed; HETCTL_FAULT_SEED repeats one.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from pathlib import Path

import pytest

from tests.faults.__main__ import cells, drawn
from tests.faults.drive import Verdict, stage
from tests.faults.judge import begun_at, judge_beginning, try_case
from tests.faults.plant import FAULTS, STAGES, cannot_be
from tests.rigs import netns

WHY_NOT = netns.unavailable()


def test_the_matrix_is_whole() -> None:
    """What cannot be is named, not passed over."""
    missing = {(f, s) for f in FAULTS for s in STAGES} - set(cells())
    of_ranks = {f for f in FAULTS if f.startswith(("worker", "store")) or f in ("exception", "segfault")}
    assert missing == {(f, "shipping") for f in (*of_ranks, "agent STOP")}
    assert all(cannot_be(*cell) for cell in missing)


def test_a_checkpoint_that_is_lost_is_noticed(tmp_path: Path) -> None:
    """The judge itself: an attempt that begins behind less than was committed."""
    run, verdict = tmp_path, Verdict("worker KILL", "step", 0)
    events = [{"event": "begin", "step": 0}, {"event": "saved", "step": 2}, {"event": "begin", "step": 2}]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"event": "beg')
    assert begun_at(run) == [0, 2]
    judge_beginning(run, 1, 2, verdict)
    assert not verdict.problems
    judge_beginning(run, 1, 3, verdict)
    assert verdict.problems == ["it began behind step 2, step 3 was committed"]


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_random_fault(tmp_path_factory: pytest.TempPathFactory) -> None:
    seed = int(os.environ.get("HETCTL_FAULT_SEED") or secrets.randbelow(1 << 31))
    print(f"seed {seed}: python -m tests.faults --random 1 --seed {seed}")
    with stage(tmp_path_factory.mktemp("f") / "r") as on:
        for case in drawn(1, random.Random(seed)):
            verdict = try_case(on, case)
            assert not verdict.problems, verdict
