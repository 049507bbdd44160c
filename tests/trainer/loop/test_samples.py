"""Texts continued on the stages that train: what one process would say, in any layout, and training does not notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from hetctl.trainer.loop.samples import continued, prompts
from hetctl.trainer.model.generation import generate
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import ModelShape
from tests.comm.spawn import on_islands
from tests.layouts import Layout, plan_of
from tests.trainer.loop.test_parity import FAMILIES, LAYOUTS
from tests.trainer.parity import SEQ_LEN, SHAPE, UnevenSamples, recipe

PROMPTS = ([3, 7, 11], [40])
STEPS, MOST = 2, 9


def trained(
    rank: int, layout: Layout, shape: ModelShape, sharded: str, look: bool
) -> tuple[list[float], list[list[int]], dict[str, torch.Tensor]]:
    """(losses, continuations after the last step, this rank's parameters then)."""
    plan = plan_of(layout, seq_len=SEQ_LEN)
    asked = recipe("sgd", clip_norm=0.5, global_batch=plan.global_batch, sharded=sharded)
    data = UnevenSamples(plan.global_batch)
    trainer = build(Job(plan, asked, shape, "unused"), torch.device("cpu"), training=data, validation=data)
    losses, said = [], list[list[int]]()
    for step in range(STEPS):
        if look:
            said = [continued(trainer, prompt, most=MOST) for prompt in PROMPTS]
        losses.append(trainer.train_step(step).loss)
        trainer.timeline.end_step()
    said = [continued(trainer, prompt, most=MOST) for prompt in PROMPTS]
    ended = continued(trainer, PROMPTS[0], most=MOST, ends={said[0][4]})
    assert ended == said[0][: said[0].index(said[0][4])]
    trainer.gradients.arrive()
    trainer.batches.close()
    return losses, said, {name: value.detach().clone() for name, value in trainer.gradients.parameters.items()}


CASES = [
    ("1+2", "llama", "auto"),
    ("1+1+1", "gemma3", "auto"),
    ("tensor 1 to 2", "llama", "auto"),
    ("replicas 5:3", "llama", "replicas"),
    ("an idle rank", "llama", "auto"),
    ("sharded beside stages", "llama", "all"),
    ("interleaved", "llama", "auto"),
]


@pytest.mark.parametrize(("name", "family", "sharded"), CASES)
def test_every_layout_says_what_one_process_does(name: str, family: str, sharded: str) -> None:
    layout, shape = LAYOUTS[name], FAMILIES.get(family, SHAPE)
    sizes = tuple(map(len, layout.islands))
    found = on_islands(sizes, trained, layout, shape, sharded, True)
    quiet = on_islands(sizes, trained, layout, shape, sharded, False)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in quiet]
    assert all(said == found[0][1] for _, said, _ in found)
    if any(cut.tensor > 1 or cut.shards > 1 for pipe in layout.pipes for cut in pipe.cuts):
        return  # no rank holds whole weights to ask one process with
    model = StageModel(shape, (0, shape.layers)).double()
    held = {n: v for _, _, mine in found for n, v in mine.items()}
    with torch.no_grad():
        for parameter_name, parameter in model.named().items():
            parameter.copy_(held[parameter_name])
    assert found[0][1] == [list(generate(model, prompt, most=MOST)) for prompt in PROMPTS]


class Held(UnevenSamples):
    """Samples of which some tokens bear loss."""

    def batch(self, step: int, first: int, past_last: int):  # type: ignore[no-untyped-def]
        inputs, targets = super().batch(step, first, past_last)
        targets = targets.copy()
        targets[:] = 1
        targets[0, :5] = IGNORED
        return inputs, targets


def test_prompts_end_before_what_bears_loss_or_in_the_middle() -> None:
    data = Held(4)
    inputs, _ = data.batch(0, 0, 2)
    first, second = prompts(data, 2)
    assert first == inputs[0, :6].tolist()
    assert second == inputs[1, : SEQ_LEN // 2 + 1].tolist()


def test_the_words_of_a_tensor_group_are_all_looked_at() -> None:
    layout = LAYOUTS["tensor 2"]
    (losses, said, _), (_, same, _) = on_islands((2,), trained, layout, replace(SHAPE, vocab=51), "auto", False)
    assert said == same
    assert len(losses) == STEPS
