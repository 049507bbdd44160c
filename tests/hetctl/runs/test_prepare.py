"""What is decided before a run starts is the same for all its ranks, and the plan says why."""

from __future__ import annotations

from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.console import Sink
from hetctl.runs.prepare import prepare
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.recipe import load_recipe


def test_where_bf16_is_lacking_all_ranks_get_fp16_and_the_plan_says_so() -> None:
    machine = Machine("here", "nccl", (2**35, 2**35), "v100")
    cluster = label_machine(parse_spec("h200:1,mi325x:1", CLASSES), machine)
    prepared = prepare(load_recipe(None), cluster, speeds={}, way="local", sink=Sink())
    assert prepared.recipe.train.precision == "fp16"
    assert any("All compute in fp16, since v100 cannot multiply bf16" in reason for reason in prepared.plan.reasons)
