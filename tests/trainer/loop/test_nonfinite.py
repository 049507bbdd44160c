"""A loss or a gradient that is not finite on any one rank: all ranks skip that step, or all stop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.events import Reporter
from hetctl.trainer.gradients.gradients import Gradients
from hetctl.trainer.job import Job
from hetctl.trainer.loop import loop
from hetctl.trainer.loop.build import build
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

STAGES = Layout(((0,), (1,)), (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 4),))
REPLICAS = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 2, 2), Pipe((Cut((0, 4), (1,)),), 2, 2)))
PLANTED = 1  # the step whose backward goes wrong on rank 1


def planted(rank: int, layout: Layout, on_nonfinite: str, sharded: str) -> tuple[list[float], int, bool, str]:
    """(losses, updates, whether the planted step changed a parameter, what stopped the run)."""
    plan = plan_of(layout, seq_len=SEQ_LEN)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, on_nonfinite=on_nonfinite, sharded=sharded)
    trainer = build(Job(plan, asked, SHAPE, "unused"), torch.device("cpu"), training=UnevenSamples(8))
    right, losses, changed, why = trainer.gradients.squared_norm, [], False, ""
    for step in range(3):
        before = [m.detach().clone() for m in trainer.gradients.parameters.values()]
        wrong = rank == 1 and step == PLANTED
        trainer.gradients.squared_norm = (lambda: right() * math.nan) if wrong else right  # type: ignore[method-assign]
        try:
            losses.append(trainer.train_step(step).grad_norm)
        except WorkFailed as error:
            why = str(error)
            break
        trainer.timeline.end_step()
        trainer.gradients.arrive()
        after = trainer.gradients.parameters.values()
        if step == PLANTED:
            changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trainer.batches.close()
    return losses, trainer.updates, changed, why


@pytest.mark.parametrize("sharded", ["optimizer", "replicas", "all"])
@pytest.mark.parametrize("layout", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_all_ranks_skip_the_same_step(layout: Layout, sharded: str) -> None:
    for norms, updates, changed, why in on_islands((1, 1), planted, layout, "skip", sharded):
        assert [math.isfinite(n) for n in norms] == [True, False, True]
        assert (updates, changed, why) == (2, False, "")


@pytest.mark.parametrize("layout", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_all_ranks_stop_at_the_same_step(layout: Layout) -> None:
    for norms, updates, _, why in on_islands((1, 1), planted, layout, "stop", "auto"):
        assert (len(norms), updates) == (1, 1)
        assert f"not finite at step {PLANTED + 1}" in why


def run_that_skips(rank: int, folder: str) -> list[dict[str, Any]]:
    """A whole run over a text whose second step goes wrong on rank 1, and what its first rank told."""
    import os

    plan = plan_of(REPLICAS, seq_len=SEQ_LEN)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, on_nonfinite="skip", validation_samples=8)
    data = replace(asked.data, source=f"{folder}/text", validation_share=0.3)
    asked = replace(asked, data=data, train=replace(asked.train, steps=3))
    told = Path(folder) / f"events-{rank}"
    os.environ[variables.EVENTS] = str(os.open(told, os.O_RDWR | os.O_CREAT))
    right, count = Gradients.squared_norm, [0]

    def wrong(self: Any) -> torch.Tensor:
        count[0] += 1
        return right(self) * (math.nan if rank == 1 and count[0] == 1 + PLANTED else 1.0)

    Gradients.squared_norm = wrong  # type: ignore[method-assign]
    job = Job(plan, asked, replace(SHAPE, vocab=300), f"{folder}/checkpoints")
    loop.run(job, torch.device("cpu"), Reporter(active=rank == 0))
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_a_skipped_step_is_said_and_counted(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what a text says. " * 2000)
    told = on_islands((1, 1), run_that_skips, str(tmp_path))[0]
    notes = [event["sentence"] for event in told if event["event"] == "note"]
    assert f"step {PLANTED + 1} changed nothing: its loss or gradient is not finite" in notes
    (summary,) = (event for event in told if event["event"] == "summary")
    assert summary["skipped_steps"] == 1
