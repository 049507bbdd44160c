"""Trainers that other people made, unchanged over islands: their losses are those of gloo alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.hetctl.process import ROOT, hetctl

PROGRAMS, TRAINERS = ROOT / "tests" / "programs", str(ROOT / "build" / "trainers")
NEEDS = {"transformers": "transformers", "trl": "trl", "lightning": "lightning", "deepspeed": "deepspeed"}
SPECS = ("cpu:2,cpu:2", "cpu:1,cpu:3", "cpu:1,cpu:1,cpu:2")
CASES = [
    *((name, "") for name in ("transformers_trainer", "trl_sft", "lightning_trainer", "lightning_fabric")),
    *(("deepspeed_zero", stage) for stage in "13"),
]


@cache
def over_gloo(program: str, word: str) -> dict[str, Any]:
    """What the program says where torchrun starts its four ranks."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with tempfile.TemporaryDirectory() as folder:
        argv += words(program, folder, word)
        done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return said_in(done.stdout)


def words(program: str, folder: str | Path, word: str) -> tuple[str, ...]:
    """The program, where it may save, and what it is told."""
    return str(PROGRAMS / f"{program}.py"), str(folder), word


def said_in(out: str) -> dict[str, Any]:
    (line,) = (line for line in out.splitlines() if '"losses"' in line)
    said: dict[str, Any] = json.loads(line[line.index("{") :])
    return said


@pytest.mark.parametrize(
    ("program", "word", "spec"),
    [
        pytest.param(*one, spec, marks=[] if (one, spec) == (CASES[0], SPECS[0]) else pytest.mark.slow)
        for one in CASES
        for spec in SPECS
    ],
)
def test_losses_are_those_of_gloo(
    program: str, word: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed takes what it finds, but on hosts it asks
    package = NEEDS[program.partition("_")[0]]
    if PathFinder.find_spec(package, [*sys.path, TRAINERS]) is None:
        pytest.skip(f"no {package}: .ci/run says how it is installed into build/trainers")
    if PathFinder.find_spec(package, [TRAINERS]) is not None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [TRAINERS, os.environ.get("PYTHONPATH")])))
    alone = over_gloo(program, word)
    done = hetctl("run", "--emulate", spec, "--as-nccl", "--", "python", *words(program, tmp_path, word))
    assert done.returncode == 0, done.stderr[-3000:]
    found = said_in(done.stdout)
    assert (alone["backend"], found["backend"]) == ("gloo", "het")
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-6)
