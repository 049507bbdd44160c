"""Early ends and best checkpoints: an interrupted run, under another layout too, ends and keeps as one in one go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.events import Note, Reporter, TrainingEnded, Validated
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.best import BestSoFar
from hetctl.trainer.checkpoint.per_host import make_file_group
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build, resume, save_with
from hetctl.trainer.loop.loop import Steps
from hetctl.trainer.recipe import CheckpointSection, TrainSection, load_recipe
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

STAGES = Layout(((0,), (1,)), (Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 2, 4),))
REPLICAS = Layout(((0,), (1,)), (Pipe((Cut((0, 4), (0,)),), 2, 3), Pipe((Cut((0, 4), (1,)),), 2, 1)))
LOSSES = {2: 5.0, 4: 4.0, 6: float("nan"), 8: 3.5, 10: 3.5, 12: 3.6, 14: 3.7, 16: 1.0}  # after steps
PATIENCE, BEST, ENDS = 3, 8, 14


class Heard(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(active=False)
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def attempt(rank: int, layout: Layout, folder: str, stops: int | None, more: dict[str, Any]) -> dict[str, Any]:
    """Steps until the run ends, or is asked to end in step `stops`; what it said and what its folder holds then."""
    checkpoints = Path(folder)
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, validate_every=2, patience=PATIENCE)
    asked = replace(asked, checkpoint=CheckpointSection(every=3, keep=1, keep_best=True))
    asked = replace(asked, train=replace(asked.train, **more))
    data, newest = UnevenSamples(8), listing.newest(checkpoints)
    job = Job(plan_of(layout, seq_len=SEQ_LEN), asked, SHAPE, folder, str(newest) if newest else None)
    trainer, files = build(job, torch.device("cpu"), training=data, validation=data), make_file_group()
    start = resume(trainer, newest, files) if newest else 0
    reporter = Heard()
    save_with(trainer, reporter, files, beyond=start)
    steps = Steps(trainer, reporter, files, start=start, saved=start if newest else -1)
    trainer.validate = lambda: LOSSES.get(steps.done)  # type: ignore[method-assign]
    step, figures = trainer.train_step, list[Any]()

    def interrupted(number: int) -> Any:
        trainer.requests.stop = number + 1 == stops
        figures.append(step(number))
        return figures[-1]

    trainer.train_step = interrupted  # type: ignore[method-assign]
    steps.train()
    steps.end()
    (end,) = (e for e in reporter.events if isinstance(e, TrainingEnded))
    return {
        "steps": end.steps,
        "best": (end.best_step, end.best_validation_loss, end.stalled),
        "validated": [e.step for e in reporter.events if isinstance(e, Validated)],
        "notes": [e.sentence for e in reporter.events if isinstance(e, Note)],
        "kept": [p.name for p in listing.whole_ones(checkpoints)],
        "losses": [f.loss for f in figures],
    }


def attempts(tmp_path: Path, *parts: tuple[Layout, int | None], **more: Any) -> list[dict[str, Any]]:
    found = []
    for layout, stops in parts:
        first, second = on_islands((1, 1), attempt, layout, str(tmp_path), stops, more)
        assert first == second | {"losses": first["losses"]}
        found.append(first)
    return found


def test_a_run_ends_where_validations_stall_and_keeps_its_best(tmp_path: Path) -> None:
    (whole,) = attempts(tmp_path, (STAGES, None))
    assert whole["steps"] == ENDS
    assert whole["best"] == (BEST, 3.5, PATIENCE)
    assert whole["validated"] == [2, 4, 6, 8, 10, 12, 14]
    assert (
        "ended after step 14: 3 validations in a row had no lower loss than the one after step 8" in whole["notes"][0]
    )
    assert whole["kept"] == ["step-00000008", "step-00000014"]
    assert listing.of_step(tmp_path, "best").name == "step-00000008"
    manifest = json.loads((tmp_path / "step-00000014" / listing.MANIFEST).read_text())
    assert manifest["best"] == {"step": BEST, "loss": 3.5, "since": PATIENCE, "seen": ENDS}


@pytest.mark.parametrize("stops", [7, 8, 12, 13])  # 8: before the best validation of its step; 12: in the count
def test_an_interrupted_run_under_another_layout_ends_and_keeps_the_same(tmp_path: Path, stops: int) -> None:
    (whole,) = attempts(tmp_path / "whole", (STAGES, None))
    before, after = attempts(tmp_path / "parts", (STAGES, stops), (REPLICAS, None))
    assert before["steps"] == stops
    for what in ("steps", "best", "kept"):
        assert after[what] == whole[what]
    assert before["validated"] + after["validated"] == whole["validated"]
    assert before["losses"] + after["losses"] == pytest.approx(whole["losses"], rel=1e-10)
    (again,) = attempts(tmp_path / "parts", (STAGES, None))
    assert (again["steps"], again["losses"]) == (ENDS, []), "it has ended"
    (further,) = attempts(tmp_path / "parts", (STAGES, None), patience=PATIENCE + 1)
    assert (further["steps"], further["best"]) == (20, (16, 1.0, None))


def test_the_last_validation_may_be_the_best_one(tmp_path: Path) -> None:
    (whole,) = attempts(tmp_path, (STAGES, None), steps=8, patience=None)
    assert whole["best"] == (8, 3.5, None)
    assert whole["kept"] == ["step-00000008"]
    assert listing.of_step(tmp_path, "best").name == "step-00000008"


def test_equal_is_no_better_and_no_step_counts_twice() -> None:
    best = BestSoFar().after(2, 1.0).after(4, 1.0).after(4, 0.5)
    assert best == BestSoFar(2, 1.0, since=1, seen=4)
    assert best.after(6, float("inf")).after(8, None).since == 3
    assert best.after(6, 0.9) == BestSoFar(6, 0.9, since=0, seen=6)


@pytest.mark.parametrize("key", ["train.patience", "checkpoint.keep_best"])
def test_what_compares_validations_needs_some(key: str) -> None:
    value: Any = 3 if key == "train.patience" else True
    with pytest.raises(ConfigError, match=key) as refused:
        load_recipe(None, [(key, value)])
    assert "train.validate_every=N" in refused.value.hint
    assert load_recipe(None, [(key, value), ("train.validate_every", 5)]).train.patience in (None, 3)
    assert TrainSection().patience is None


def test_a_best_step_that_is_not_kept_is_said_to_be_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows no best checkpoint"):
        listing.of_step(tmp_path, "best")
    (tmp_path / "step-00000009").mkdir()
    manifest = {"best": {"step": 4, "loss": 1.0, "since": 1, "seen": 8}}
    (tmp_path / "step-00000009" / listing.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="no checkpoint of step 4") as refused:
        listing.of_step(tmp_path, "best")
    assert refused.value.hint == "the best validation was there: checkpoint.keep_best=true keeps it; there are: 9"
    assert listing.of_step(tmp_path, "9").name == "step-00000009"
    with pytest.raises(ConfigError, match="'last' is not a step"):
        listing.of_step(tmp_path, "last")
