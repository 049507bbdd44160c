"""Preference training: any layout equals `peft` and DPO's formula in one process, one pair at a time, in fp64."""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetctl.comm.contract import variables
from hetctl.comm.contract.events import Reporter
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.per_host import make_file_group
from hetctl.trainer.job import Job
from hetctl.trainer.loop import loop
from hetctl.trainer.loop.build import build, resume, save_with
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import Recipe
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.loop.test_parity import ADAPTED, DORA, LAYOUTS
from tests.trainer.model.test_peft_files import ours_of, peft_start, plain_steps
from tests.trainer.model.transformers_families import in_double
from tests.trainer.parity import (
    SEQ_LEN,
    SHAPE,
    STEPS,
    Trace,
    difference,
    initialise,
    recipe,
    samples_of,
    traced_step,
    train_layout,
)

pytest.importorskip("peft")
TOLERANCE = 1e-9
BETA = 0.3
TWO_AND_ONE = Layout(((0, 1), (2,)), (Pipe((Cut((0, 3), (0, 1)), Cut((3, 4), (2,))), 4, 2),))
COUNTS = Layout(  # micro-batches of other sizes and in other numbers
    ((0, 1), (2,)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1,))), 2, 3), Pipe((Cut((0, 4), (2,)),), 1, 2))
)
DPO_LAYOUTS = {name: LAYOUTS[name] for name in ("1+1", "1+1+1", "1+2")} | {"2+1": TWO_AND_ONE, "counts": COUNTS}
OTHERS = ("tensor 2", "zero bubble", "interleaved", "an idle rank", "recomputed", "activations on the host")


def asked_of(layout: Layout, *, packing: bool, optimizer: str = "adamw", **train: Any) -> Recipe:
    samples = sum(p.micro_batch_size * p.micro_batches for p in layout.pipes)
    return recipe(optimizer, clip_norm=0.5, global_batch=samples, packing=packing, beta=BETA, **train)


def pairs_of(asked: Recipe, step: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Inputs and targets of chosen and rejected, [1, tokens] each."""
    for row, target, marks in zip(*samples_of(asked).batch(step, 0, asked.batch.global_batch), strict=True):
        for pair in range(1, int(marks.max()) // 2 + 1):
            yield [
                (torch.as_tensor(row[marks == n])[None], torch.as_tensor(target[marks == n])[None])
                for n in (2 * pair - 1, 2 * pair)
            ]


def answered(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The answer's log-probability: the sum over the tokens that bear loss."""
    logs = F.log_softmax(model(input_ids=inputs).logits, dim=-1)
    return (logs.gather(2, targets.clamp(min=0)[..., None])[..., 0] * (targets != IGNORED)).sum()


@cache
def plain(asked: Recipe, shape: ModelShape) -> Trace:
    trace = Trace([], [], [])
    with tempfile.TemporaryDirectory() as folder, in_double():
        model = peft_start(shape, asked.train.seed, Path(folder))

        def loss_of(step: int) -> torch.Tensor:
            margins = []
            for chosen, rejected in pairs_of(asked, step):
                with torch.no_grad(), model.disable_adapter():
                    reference = answered(model, *chosen), answered(model, *rejected)
                policy = answered(model, *chosen), answered(model, *rejected)
                margins.append(BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1])))
            found = torch.stack(margins)
            trace.accuracies.append(float((found > 0).double().mean()))
            trace.margins.append(float(found.detach().mean()))
            return -F.logsigmoid(found).mean()

        for loss, norm in plain_steps(model, asked, loss_of):
            trace.losses.append(loss)
            trace.norms.append(norm)
            trace.parameters.append({ours_of(n): p.detach().clone() for n, p in model.named_parameters()})
    return trace


def deviation(
    layout: Layout, shape: ModelShape = ADAPTED, *, packing: bool = True, plant: str = "", **more: Any
) -> float:
    asked = asked_of(layout, packing=packing, **more)
    wanted, sizes = plain(replace(asked, train=replace(asked.train, sharded="auto")), shape), map(len, layout.islands)
    found = on_islands(tuple(sizes), train_layout, layout, asked, shape, plant, seconds=120)
    assert max(len(t.margins) for t in found) == STEPS
    for trace in found:
        for name in ("margins", "accuracies") if not plant else ():
            pairs = zip(getattr(trace, name)[1:], getattr(wanted, name)[1:], strict=True)  # all start at a margin of 0
            assert max(abs(a - b) for a, b in pairs) < TOLERANCE, name
    return difference(found, wanted)


def trainer_of_trl(model: Any, folder: Path) -> Any:
    """TRL's own, which wants a tokenizer and pairs of its own to begin with."""
    trl = pytest.importorskip("trl", reason="trl is not installed: nothing to compare with")
    from datasets import Dataset as Rows
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = models.WordLevel({str(n): n for n in range(SHAPE.vocab)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), pad_token="0", eos_token="1")
    rows = Rows.from_list([{"prompt": "1 2", "chosen": " 3", "rejected": " 4"}])
    wanted = {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": [], "max_length": None}
    config = trl.DPOConfig(output_dir=str(folder), beta=BETA, **wanted)
    return trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)


def as_trl_has_them(pairs: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """All chosen answers, then all rejected ones, filled up to one length."""
    every = [side for one in zip(*pairs, strict=True) for side in one]
    whole = [torch.cat((inputs[0], targets[0, -1:])) for inputs, targets in every]
    bears = [torch.cat((targets.new_zeros(1), (targets[0] != IGNORED).long())) for _, targets in every]
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": padded(whole),
        "attention_mask": padded([torch.ones_like(tokens) for tokens in whole]),
        "completion_mask": padded(bears),
    }


def test_the_plain_loop_is_what_trl_computes(tmp_path: Path) -> None:
    asked = asked_of(COUNTS, packing=True)
    wanted, losses = plain(asked, ADAPTED), list[float]()
    with in_double():
        model = peft_start(ADAPTED, asked.train.seed, tmp_path)
        theirs = trainer_of_trl(model, tmp_path)

        def loss_of(step: int) -> torch.Tensor:
            found: torch.Tensor = theirs.compute_loss(model, as_trl_has_them(list(pairs_of(asked, step))))
            return found

        for number, (loss, norm) in enumerate(plain_steps(model, asked, loss_of)):
            losses.append(loss)
            assert norm == pytest.approx(wanted.norms[number], rel=TOLERANCE)
    assert losses == pytest.approx(wanted.losses, abs=TOLERANCE)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "one a row"])
@pytest.mark.parametrize("name", DPO_LAYOUTS)
def test_twenty_steps_of_a_plain_loop_with_peft(name: str, packing: bool) -> None:
    assert deviation(DPO_LAYOUTS[name], packing=packing) < TOLERANCE


@pytest.mark.parametrize("name", [OTHERS[0], *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS[1:])])
def test_other_ways_to_lay_it_out_too(name: str) -> None:
    assert deviation(LAYOUTS[name]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("1+2", {"optimizer": "sgd"}),
        pytest.param("sharded beside stages", {"sharded": "all"}, marks=pytest.mark.slow),
    ],
)
def test_magnitudes_stand_aside_for_the_reference_too(name: str, more: dict[str, Any]) -> None:
    assert deviation(LAYOUTS[name], DORA, **more) < TOLERANCE


@pytest.mark.parametrize("plant", ["reference adapted", "tokens weigh alike", "dropped replica"])
def test_planted_bugs_are_caught(plant: str) -> None:
    assert deviation(COUNTS, plant=plant, optimizer="sgd") > 1e-6


DROPPING = replace(DORA, adapters=replace(DORA.adapters, dropout=0.25))


def test_dropout_leaves_out_the_same_wherever_it_is_computed() -> None:
    alone = Layout(((0,),), (Pipe((Cut((0, 4), (0,)),), 8, 1),))
    asked = asked_of(alone, packing=True)
    (wanted,) = on_islands((1,), train_layout, alone, asked, DROPPING)
    found = on_islands((1, 2), train_layout, LAYOUTS["1+2"], asked, DROPPING)
    assert difference(found, wanted) < TOLERANCE
    (whole,) = on_islands((1,), train_layout, alone, asked, DORA)
    assert abs(whole.losses[-1] - wanted.losses[-1]) > 1e-6


@pytest.mark.parametrize("shape", [ADAPTED, DROPPING])
def test_without_adapters_a_model_is_its_base(shape: ModelShape) -> None:
    torch.manual_seed(0)
    base, model = (StageModel(s, (0, 4)).double() for s in (replace(shape, adapters=None), shape))
    initialise(base, 0)
    initialise(model, 0)
    for name, parameter in model.named().items():
        if name not in base.named():
            torch.nn.init.normal_(parameter)
    tokens, draws = torch.randint(0, 48, (2, 2, SEQ_LEN))[0], torch.tensor([3, 4])
    with torch.no_grad():
        with model.without_adapters():
            assert torch.equal(model(tokens, draws=draws), base(tokens))
        assert float((model(tokens, draws=draws) - base(tokens)).abs().max()) > 1e-3


def part_of_run(rank: int, layout: Layout, folder: str, steps: int) -> list[float]:
    """The losses of some steps, from the newest checkpoint if there is one."""
    newest = listing.newest(Path(folder))
    job = Job(
        plan_of(layout, seq_len=SEQ_LEN),
        asked_of(layout, packing=True),
        ADAPTED,
        folder,
        str(newest) if newest else None,
    )
    trainer, file_group = build(job, torch.device("cpu"), training=samples_of(job.recipe)), make_file_group()
    start = resume(trainer, newest, file_group) if newest else 0
    save_with(trainer, Reporter(active=False), file_group, beyond=start)
    trace = Trace([], [], [])
    for step in range(start, start + steps):
        traced_step(trainer, step, trace)
    trainer.save(start + steps)
    assert trainer.saving is not None
    trainer.saving.finish()
    trainer.batches.close()
    return trace.losses


def test_a_run_that_goes_on_under_another_layout_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    wanted = plain(asked_of(LAYOUTS["1+1"], packing=True), ADAPTED).losses
    first = on_islands((1, 1), part_of_run, LAYOUTS["1+1"], str(tmp_path), 8)[0]
    then = on_islands((1, 1, 1), part_of_run, LAYOUTS["1+1+1"], str(tmp_path), 7)[0]
    last = on_islands((2, 1), part_of_run, TWO_AND_ONE, str(tmp_path), 5)[0]
    assert [*first, *then, *last] == pytest.approx(wanted, abs=TOLERANCE, rel=0)


def whole_run(rank: int, folder: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run's first rank told."""
    wanted = asked_of(LAYOUTS["1+1"], packing=True, validation_samples=8, validate_every=3, **more)
    data = replace(wanted.data, source=f"{folder}/pairs.jsonl", template="chatml", validation_share=0.2)
    optimizer = replace(wanted.optimizer, lr=0.03)
    wanted = replace(wanted, data=data, optimizer=optimizer, train=replace(wanted.train, steps=9))
    told = Path(folder) / f"events-{rank}"
    warnings.filterwarnings("error", message="torch.compile failed")
    os.environ[variables.EVENTS] = str(os.open(told, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    shape = replace(ADAPTED, vocab=300, max_seq_len=256)
    plan = plan_of(LAYOUTS["1+1"], seq_len=160)
    loop.run(Job(plan, wanted, shape, f"{folder}/checkpoints"), torch.device("cpu"), Reporter(active=rank == 0))
    return [json.loads(line) for line in told.read_text().splitlines()]


def write_pairs(folder: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "yes" * (n % 4 + 1), "rejected": "no"} for n in range(60)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_a_run_tells_how_its_pairs_do(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    told = on_islands((1, 1), whole_run, str(tmp_path), {}, variables={"XDG_CACHE_HOME": str(tmp_path)})[0]
    steps = [event for event in told if event["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(math.log(2))
    assert steps[-1]["loss"] < 0.6
    assert steps[-1]["accuracy"] > 0.9
    assert steps[-1]["margin"] > 0.1
    assert all(8 <= event["pairs"] < event["tokens"] for event in steps)
    (summary,) = (event for event in told if event["event"] == "summary")
    (first, second), last = summary["validations"], summary
    assert first["validation_loss"] > second["validation_loss"] > last["validation_loss"]
    assert first["validation_margin"] < second["validation_margin"] < last["validation_margin"]
    assert last["validation_accuracy"] > 0.9
    assert any(" pairs in " in event["sentence"] for event in told if event["event"] == "note")


@pytest.mark.slow
def test_compiled_blocks_make_the_same_reference_and_steps(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    losses = []
    for compiled in (False, True):
        found = on_islands(
            (1, 1),
            whole_run,
            str(tmp_path),
            {"compile": compiled},
            seconds=300,
            variables={"XDG_CACHE_HOME": str(tmp_path)},
        )[0]
        losses.append([event["loss"] for event in found if event["event"] == "step"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)
