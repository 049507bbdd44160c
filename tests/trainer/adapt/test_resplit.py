"""Layers that follow measured speeds: where cuts go, what refuses them, and that a run goes on as if nothing were."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract.events import Event, Note
from hetctl.comm.contract.plan import Plan, Predicted, StageCost
from hetctl.trainer.adapt.resplit import resplit, why_uncut
from hetctl.trainer.checkpoint.per_host import make_file_group
from hetctl.trainer.job import Job
from hetctl.trainer.loop import monitor
from hetctl.trainer.loop.build import build, rebuild, save_with
from tests.comm.spawn import on_islands
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer.parity import SEQ_LEN, SHAPE, STEPS, Trace, UnevenSamples, difference, recipe, reference, traced_step

ISLANDS = ((0,), (1, 2))
PIPELINE = Pipe((Cut((0, 2), (0,)), Cut((2, 4), (1,))), 1, 4)
MIXED = Layout(ISLANDS, (PIPELINE, Pipe((Cut((0, 4), (2,)),), 1, 4)))
TIED = replace(SHAPE, tied_embeddings=True)
GIB = 2**30


def priced(plan: Plan, *, most: int = 99) -> Plan:
    """The plan with a second a layer predicted everywhere, and memory for so many on each rank."""
    costs = tuple(tuple(StageCost.of(s, float(s.depth), 1.0, most) for s in r.stages) for r in plan.replicas)
    said = Predicted("measured", 1.0, 1.0, 0.0, 0.0, None, (GIB,) * plan.world_size, stages=costs)
    return replace(plan, predicted=said)


def deep(*pipes: Pipe, islands: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Plan:
    return priced(plan_of(Layout(islands, pipes or (Pipe((Cut((0, 6), (0,)), Cut((6, 12), (1,))), 1, 16),)), seq_len=8))


def layers(plan: Plan | None) -> list[list[int]]:
    assert plan is not None
    plan.validate(where="test", layers=plan.layer_count)
    return [[s.depth for s in r.stages] for r in plan.replicas]


def test_a_stage_that_is_slower_than_predicted_gives_layers_away() -> None:
    assert layers(resplit(deep(), {0: 6.0, 1: 12.0}, tied=False)) == [[8, 4]]
    assert resplit(deep(), {0: 6.0, 1: 6.0}, tied=False) is None
    assert resplit(deep(), {0: 12.0, 1: 12.0}, tied=False) is None  # both alike: another cut would not help
    assert resplit(deep(), {0: 6.0, 1: 6.2}, tied=False) is None  # nor is it worth it


def test_a_stage_grows_only_as_far_as_it_certainly_fits() -> None:
    slow = {0: 6.0, 1: 12.0}
    grown = resplit(priced(deep(), most=7), slow, tied=False)
    assert layers(grown) == [[7, 5]]
    assert grown is not None
    assert resplit(grown, {0: 7.0, 1: 10.0}, tied=False) is None  # nor further the next time
    assert resplit(priced(deep(), most=6), slow, tied=False) is None
    assert resplit(priced(deep(), most=1), slow, tied=False) is None  # edited: what is there stays


def test_segments_and_the_groups_that_sum_them_follow() -> None:
    islands, other = ((0, 2), (1, 3)), Pipe((Cut((0, 6), (2,)), Cut((6, 12), (3,))), 1, 16)
    made = deep(Pipe((Cut((0, 6), (0,)), Cut((6, 12), (1,))), 1, 16), other, islands=islands)
    found = resplit(made, {0: 6.0, 1: 12.0, 2: 6.0, 3: 12.0}, tied=True)
    assert layers(found) == [[8, 4], [8, 4]]
    assert found is not None
    sums = {g.name: (g.ranks, g.backend) for g in found.groups if g.kind == "segment"}
    assert sums == {
        "segment.0-8": ((0, 2), "gloo"),
        "segment.8-12": ((1, 3), "gloo"),
        "tied": ((0, 1, 2, 3), "het"),
    }
    apart = resplit(made, {0: 6.0, 1: 12.0, 2: 12.0, 3: 12.0}, tied=False)
    assert apart is None  # the other replica, slow altogether, is what all wait for


def test_islands_that_never_talked_are_not_joined() -> None:
    islands = ((0,), (1,), (2,), (3,))
    pipes = [Pipe((Cut((0, 6), (a,)), Cut((6, 12), (b,))), 1, 16) for a, b in ((0, 1), (2, 3))]
    made, paces = deep(*pipes, islands=islands), {0: 6.0, 1: 12.0, 2: 12.0, 3: 6.0}
    assert layers(resplit(made, paces, tied=False)) == [[8, 4], [4, 8]]  # a segment of ranks 0 and 3
    few = tuple(b for b in made.bridges if set(b.islands) != {"i0", "i3"})
    assert resplit(replace(made, bridges=few), paces, tied=False) is None


def test_what_cannot_be_cut_says_why() -> None:
    free = recipe("sgd", clip_norm=1.0, global_batch=4)
    whole = priced(plan_of(Layout(((0,),), (Pipe((Cut((0, 4), (0,)),), 1, 4),)), seq_len=8))
    shared = Pipe(tuple(Cut((i, i + 1), (i % 2,)) for i in range(4)), 1, 4)
    assert why_uncut(deep(), free) == ""
    assert "no replica" in why_uncut(whole, free)
    assert "does not say" in why_uncut(plan_of(Layout(((0,), (1,)), (PIPELINE,)), seq_len=8), free)
    only = deep().replicas[0]
    for edit in ({"micro_batch_size": 2}, {"recompute": "full"}, {"tensor_parallel": 2}, {"ranks": (0, 1)}):
        other = replace(only, stages=tuple(replace(s, **edit) for s in only.stages))  # what the plan says is of others
        assert "does not say" in why_uncut(replace(deep(), replicas=(other,)), free), edit
    assert "interleaved" in why_uncut(priced(plan_of(Layout(((0,), (1,)), (shared,)), seq_len=8)), free)
    pinned = replace(free, parallelism=replace(free.parallelism, layers=(6, 6)))
    assert "the recipe says" in why_uncut(deep(), pinned)


class Notes:
    """Stands for the reporter: keeps what would be reported."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def emit(self, event: Event) -> None:
        self.said += [event.sentence] if isinstance(event, Note) else []


def moved(rank: int, asked: Any, shape: Any, folder: str, paces: Mapping[int, float]) -> tuple[Trace, list[str], Any]:
    """A run whose layers move after the checkpoint of the seventh step; what its ranks hold, step by step."""
    monitor.pace_of = lambda *_: paces[rank]
    notes: Any = Notes()
    plan = priced(plan_of(MIXED, seq_len=SEQ_LEN))
    trainer = build(Job(plan, asked, shape, folder), torch.device("cpu"), training=UnevenSamples(8))
    file_group = make_file_group()
    save_with(trainer, notes, file_group, beyond=0)
    watcher, trace = monitor.SpeedMonitor(trainer, notes, adapt=True), Trace([], [], [])
    for step in range(STEPS):
        traced_step(trainer, step, trace)
        watcher.after(step + 1)
        trace.slots.update({slot.name: slot for bucket in trainer.gradients.buckets for slot in bucket.layout.slots})
        if step + 1 == 7:
            trainer.save(7)
            better = watcher.better_layers(7)
            assert better is not None
            old = [weakref.ref(p) for model in trainer.models for p in model.parameters()]
            trainer = rebuild(trainer, better, 7, notes, file_group)
            watcher.follow(trainer)
            assert not [kept for kept in old if kept() is not None], "the old models' memory"
    trainer.batches.close()
    return trace, notes.said, [trainer.so_far.steps, watcher.findings["recut"]]


@pytest.mark.parametrize("sharded", ["optimizer", "replicas"])
@pytest.mark.parametrize("shape", [SHAPE, pytest.param(TIED, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_layers_follow_speeds_and_nothing_else_changes(shape: Any, sharded: str, tmp_path: Path) -> None:
    asked = recipe("adamw", clip_norm=0.5, global_batch=8, sharded=sharded)
    paces = {0: 2.0, 1: 6.0, 2: 4.0}
    found = on_islands((1, 2), moved, asked, shape, str(tmp_path), paces)
    wanted = reference(asked, shape)
    assert difference([trace for trace, *_ in found], wanted) < 1e-10
    change = {"step": 7, "before": [[2, 2], [4]], "after": [[3, 1], [4]]}
    sentence = "layers follow speeds from step 8 on: [[2, 2], [4]] -> [[3, 1], [4]]"
    for trace, said, (steps, recut) in found:
        assert (steps, recut) == (STEPS, [change])
        assert sentence in said
        assert len(trace.losses) == STEPS
    early, late = (set(found[0][0].parameters[step]) for step in (6, 7))
    assert any("layers.2." in name for name in late - early), "the third layer came to rank 0"
