"""A plan file where devices have less memory than it was made for: held to that, and said where it will not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.commands.options import RunOptions
from hetctl.console import Sink
from hetctl.runs.prepare import _checked_plan
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

GiB = 2**30


@pytest.mark.parametrize(("here", "tight"), [(140 * GiB, 0), (70 * GiB, 0), (4 * GiB, 2)])
def test_ranks_are_held_to_the_memory_of_the_devices_here(
    here: int, tight: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["parallelism.pipeline=2", "model.name=llama-1b-untied"]
    recipe = load_recipe(None, RunOptions(settings=settings, seq_len=2048, global_batch=8).overrides)
    spec, machine = parse_spec("h200:1,mi325x:1", CLASSES), Machine("there", "nccl", (140 * GiB,) * 2)
    plan = make_plan(label_machine(spec, machine), recipe)
    mine = label_machine(spec, replace(machine, host="here", memory_bytes=(here,) * 2, gpus=1))
    held = _checked_plan(plan, mine, recipe, Sink())
    assert [r.memory_bytes for r in held.ranks] == [here] * 2
    said = capsys.readouterr().err
    assert said.count("is predicted to need") == tight, (said, plan.predicted)
