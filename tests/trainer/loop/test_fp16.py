"""fp16 with a loss scale: exact under pipelines and uneven replicas, overflows skipped alike, kept by checkpoints."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.events import Reporter
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.per_host import make_file_group
from hetctl.trainer.gradients.loss_scale import STEPS_TO_DOUBLE, LossScale
from hetctl.trainer.job import Job
from hetctl.trainer.loop import loop
from hetctl.trainer.loop.build import build, resume, save_with
from hetctl.trainer.recipe import Recipe, load_recipe
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.loop.test_parity import LAYOUTS, ONE_EACH, REPLICAS, SHARDED
from tests.trainer.parity import SEQ_LEN, SHAPE, Trace, UnevenSamples, difference, recipe, reference, train_layout

UNEVEN = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 1, 5), Pipe((Cut((0, 4), (1,)),), 1, 3)))
TOO_MUCH = 2.0**24  # of a loss scale, for these gradients


def alone(micro_batch_size: int) -> Layout:
    return Layout(((0,),), (Pipe((Cut((0, 4), (0,)),), micro_batch_size, 8 // micro_batch_size),))


def asked(optimizer: str = "sgd", *, clip_norm: float = 0.0, **train: Any) -> Recipe:
    return recipe(optimizer, clip_norm=clip_norm, global_batch=8, precision="fp16", **train)


def trained(layout: Layout, wanted: Recipe) -> list[Trace]:
    found: list[Trace] = on_islands(tuple(map(len, layout.islands)), train_layout, layout, wanted)
    return found


@pytest.mark.parametrize("layout", [ONE_EACH, REPLICAS], ids=["stages", "replicas 5:3"])
def test_islands_train_in_fp16_as_one_process_does(layout: Layout) -> None:
    """Products of one micro-batch are the same everywhere, and sums over micro-batches and replicas are fp32."""
    (lonely,) = trained(alone(layout.pipes[0].micro_batch_size), asked())
    assert difference(trained(layout, asked()), lonely) < 1e-6
    wide = reference(recipe("sgd", clip_norm=0.0, global_batch=8))
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(lonely.norms, wide.norms, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS["tensor 2"], SHARDED], ids=["tensor 2", "shards"])
def test_what_sums_in_fp16_is_as_near_as_fp16_is(layout: Layout) -> None:
    (lonely,) = trained(alone(2), asked("adamw", clip_norm=0.5))
    assert difference(trained(layout, asked("adamw", clip_norm=0.5)), lonely) < 5e-3


def searched(rank: int, layout: Layout, planted: int) -> list[tuple[float | None, bool, bool]]:
    """Of each step the loss scale, whether it was finite, and whether it changed a parameter."""
    plan = plan_of(layout, seq_len=SEQ_LEN)
    wanted = asked("adamw", clip_norm=0.5) if planted >= 0 else asked("adamw", clip_norm=0.5, loss_scale=TOO_MUCH)
    trainer = build(Job(plan, wanted, SHAPE, "unused"), torch.device("cpu"), training=UnevenSamples(8))
    right, told = trainer.gradients.squared_norm, []
    for step in range(14):
        before = [m.detach().clone() for m in trainer.gradients.parameters.values()]
        wrong = rank == 1 and step == planted
        trainer.gradients.squared_norm = (lambda: right() * math.inf) if wrong else right  # type: ignore[method-assign]
        figures = trainer.train_step(step)
        trainer.timeline.end_step()
        trainer.gradients.arrive()
        after = trainer.gradients.parameters.values()
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        told.append((figures.loss_scale, figures.finite, changed))
    trainer.batches.close()
    assert trainer.updates == sum(finite for _, finite, _ in told)
    return told


@pytest.mark.parametrize("layout", [ONE_EACH, UNEVEN], ids=["stages", "replicas 5:3"])
def test_a_scale_that_is_too_large_is_halved_on_all_ranks_alike_until_it_fits(layout: Layout) -> None:
    first, second = on_islands((1, 1), searched, layout, -1)
    finite = [done for _, done, _ in first]
    skips = finite.index(True)
    assert 2 <= skips <= 12
    assert finite == [False] * skips + [True] * (14 - skips)
    assert [scale for scale, _, _ in first] == [TOO_MUCH / 2 ** min(n, skips) for n in range(14)]
    assert [t[:2] for t in first] == [t[:2] for t in second]
    assert all(changed == done for told in (first, second) for _, done, changed in told)


def test_an_overflow_on_one_rank_is_skipped_by_all_and_does_not_stop_the_run() -> None:
    for told in on_islands((1, 1), searched, UNEVEN, 3):
        assert [finite for _, finite, _ in told] == [step != 3 for step in range(14)]
        assert told[4][0] == (told[3][0] or 0) / 2
        assert told[13][0] == told[4][0]


def test_the_scale_doubles_after_many_finite_steps_and_ends_the_run_below_one() -> None:
    scale = LossScale(4.0)
    for step in range(STEPS_TO_DOUBLE - 1):
        scale = scale.after(step, finite=True)
    assert scale.value == 4.0
    assert scale.after(0, finite=False) == LossScale(2.0)
    assert scale.after(0, finite=True) == LossScale(8.0)
    with pytest.raises(WorkFailed, match="not finite at step 8, though fp16's loss scale is down to 1"):
        LossScale(1.0).after(7, finite=False)


def part_of_run(rank: int, layout: Layout, folder: str, steps: int) -> tuple[LossScale | None, LossScale | None]:
    """The scale at the beginning of some steps, from the newest checkpoint if there is one, and at their end."""
    newest = listing.newest(Path(folder))
    plan = plan_of(layout, seq_len=SEQ_LEN)
    job = Job(plan, asked(loss_scale=TOO_MUCH), SHAPE, folder, str(newest) if newest else None)
    trainer, file_group = build(job, torch.device("cpu"), training=UnevenSamples(8)), make_file_group()
    start = resume(trainer, newest, file_group) if newest else 0
    save_with(trainer, Reporter(active=False), file_group, beyond=start)
    begun = trainer.loss_scale
    for step in range(start, start + steps):
        trainer.train_step(step)
        trainer.timeline.end_step()
        trainer.gradients.arrive()
    trainer.save(start + steps)
    assert trainer.saving is not None
    trainer.saving.finish()
    trainer.batches.close()
    return begun, trainer.loss_scale


def test_a_run_that_goes_on_under_another_plan_keeps_its_scale(tmp_path: Path) -> None:
    (before,) = on_islands((1,), part_of_run, alone(2), str(tmp_path), 14)
    assert before[0] == LossScale(TOO_MUCH)
    assert before[1].value < TOO_MUCH
    assert before[1].finite_steps > 0
    for begun, ended in on_islands((1, 1), part_of_run, UNEVEN, str(tmp_path), 2):
        assert begun == before[1]
        assert ended == LossScale(begun.value, begun.finite_steps + 2)


def whole_run(rank: int, folder: str) -> list[dict[str, Any]]:
    """What a run's first rank told."""
    wanted = asked("adamw", clip_norm=0.5, loss_scale=TOO_MUCH, validation_samples=8)
    data = replace(wanted.data, source=f"{folder}/text", validation_share=0.3)
    wanted = replace(wanted, data=data, train=replace(wanted.train, steps=12))
    told = Path(folder) / f"events-{rank}"
    os.environ[variables.EVENTS] = str(os.open(told, os.O_RDWR | os.O_CREAT))
    job = Job(plan_of(UNEVEN, seq_len=SEQ_LEN), wanted, replace(SHAPE, vocab=300), f"{folder}/checkpoints")
    loop.run(job, torch.device("cpu"), Reporter(active=rank == 0))
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_scales_and_skips_are_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what a text says. " * 2000)
    told = on_islands((1, 1), whole_run, str(tmp_path))[0]
    steps = [event for event in told if event["event"] == "step"]
    skipped = [event for event in steps if event["grad_norm"] is None]
    assert steps[0]["loss_scale"] == TOO_MUCH > steps[-1]["loss_scale"]
    assert 0 < len(skipped) < len(steps)
    (summary,) = (event for event in told if event["event"] == "summary")
    assert summary["skipped_steps"] == len(skipped)
    notes = [event["sentence"] for event in told if event["event"] == "note"]
    assert "step 1 changed nothing: its gradient leaves fp16 at a loss scale of 16777216, which is halved" in notes


@pytest.mark.parametrize("scale", [3, 0.5, 2**65])
def test_a_scale_is_a_power_of_two(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.loss_scale must be a power of two"):
        load_recipe(None, [("train.loss_scale", scale)])
