"""torchcomms over islands: its operations by `new_comm("het", ...)`, each held against what it must give."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder

import pytest

from tests.hetctl.process import ROOT, hetctl

BUILT = str(ROOT / "build" / "torchcomms")
FOLDERS = {"stand-in": str(ROOT / "tests" / "stand_ins"), "torchcomms": BUILT}


@pytest.mark.parametrize("spec", ["h200:2,mi325x:1", "h200:1,mi325x:2,rtx4090:1", "h200:2"])
@pytest.mark.parametrize("which", FOLDERS)
def test_every_operation_gives_what_it_must(which: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if which == "torchcomms" and PathFinder.find_spec("torchcomms", [BUILT]) is None:
        pytest.skip("torchcomms is not built: `make build/torchcomms` does, from its source")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDERS[which], str(ROOT)]))
    done = hetctl("run", "--emulate", spec, "--", "python", "tests/programs/torchcomms_operations.py")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = sum(int(island.partition(":")[2]) for island in spec.split(","))
    said = done.stdout + done.stderr
    assert [r for r in range(ranks) if f"rank {r}: ok" in said] == list(range(ranks)), said
