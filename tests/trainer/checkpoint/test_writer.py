"""Checkpoints: any layout's under any other, whole or not there after a crash anywhere, damage named."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.events import Reporter
from hetctl.comm.operation.device import rank_device
from hetctl.trainer.checkpoint import listing, writer
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.job import Job
from hetctl.trainer.loop import loop
from hetctl.trainer.loop.build import build
from hetctl.trainer.model.model import shapes_of
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import Recipe
from tests.comm.spawn import on_islands, server
from tests.layouts import Cut, Layout, Pipe, plan_of
from tests.trainer import parity
from tests.trainer.loop.test_parity import ADAPTED, LAYOUTS
from tests.trainer.parity import (
    SEQ_LEN,
    SHAPE,
    Trace,
    UnevenSamples,
    difference,
    part_of,
    recipe,
    reference,
    traced_step,
)

STEPS = 6
LATE_SECONDS = 9
ONE = Layout(((0,),), (Pipe((Cut((0, 4), (0,)),), 2, 4),))
SHARDS = Layout(((0, 1),), (Pipe((Cut((0, 4), (0, 1), 2),), 4, 2),))
STAGES = Layout(((0,), (1, 2)), (Pipe((Cut((0, 1), (0,)), Cut((1, 4), (1, 2), 2)), 2, 4),))
TENSOR = Layout(((0, 1, 2, 3),), (Pipe((Cut((0, 4), (0, 1, 2, 3), 2, tensor=2),), 4, 2),))
REPLICAS = Layout(((0, 1), (2,)), (Pipe((Cut((0, 4), (0, 1), 2),), 2, 3), Pipe((Cut((0, 4), (2,)),), 2, 1)))
TENSORS = Layout(((0, 1, 2, 3), (4,)), (Pipe((Cut((0, 3), (0, 1, 2, 3), tensor=4), Cut((3, 4), (4,))), 2, 4),))


def part_of_run(
    rank: int,
    layout: Layout,
    folder: str,
    first: int,
    last: int,
    every: int = 0,
    sharded: str = "auto",
    shape: ModelShape = SHAPE,
    change: Callable[[Recipe], Recipe] = lambda asked: asked,
) -> Trace:
    """Steps [first, last) of a run under a layout, continued from the newest checkpoint, saved at the end."""
    torch.manual_seed(rank)
    plan = plan_of(layout, seq_len=SEQ_LEN)
    newest = listing.newest(Path(folder))
    job = Job(plan, change(asked(sharded=sharded)), shape, folder, str(newest) if newest else None)
    trainer = build(job, rank_device(), training=UnevenSamples(plan.global_batch))
    start = 0
    if newest:
        start, trainer.updates = writer.load(newest, trainer.gradients, trainer.optimizer)
    assert start == first
    trainer.saving = writer.Checkpoints(Path(folder), trainer.gradients, trainer.optimizer, keep=2, beyond=start)
    slots = {slot.name: slot for bucket in trainer.gradients.every for slot in bucket.layout.slots}
    trace = Trace([], [], [], slots)
    for step in range(first, last):
        traced_step(trainer, step, trace)
        if step + 1 == last or (every and (step + 1) % every == 0):
            trainer.save(step + 1)
    trainer.saving.finish()
    trainer.batches.close()
    return trace


def asked(**train: Any) -> Any:
    return recipe("adamw", clip_norm=0.5, global_batch=8, **train)


def run(layout: Layout, folder: Path, first: int, last: int, **more: Any) -> list[Trace]:
    sizes = tuple(len(island) for island in layout.islands)
    found: list[Trace] = on_islands(sizes, part_of_run, layout, str(folder), first, last, *more.values())
    return found


def test_a_checkpoint_continues_under_any_other_layout(tmp_path: Path) -> None:
    wanted = reference(asked())
    for number, layout in enumerate((ONE, STAGES, REPLICAS, SHARDS, TENSOR, TENSORS, REPLICAS, TENSOR, STAGES, ONE)):
        sharded = "replicas" if layout is REPLICAS else "auto"  # everybody's state, of equal parts
        found = run(layout, tmp_path, 2 * number, 2 * number + 2, every=0, sharded=sharded)
        part = slice(2 * number, 2 * number + 2)
        assert difference(found, part_of(wanted, part)) < 1e-10
    assert [p.name for p in listing.whole_ones(tmp_path)] == ["step-00000018", "step-00000020"]
    assert not list(tmp_path.glob("*.partial"))
    assert Reader(tmp_path / "step-00000020").shapes.keys() == wanted.parameters[0].keys()


def test_adapters_continue_under_any_other_layout_and_are_all_that_is_saved(tmp_path: Path) -> None:
    wanted = reference(asked(), ADAPTED)
    for number, layout in enumerate((ONE, STAGES, TENSOR, REPLICAS)):
        sharded = "all" if layout is STAGES else "auto"
        found = run(layout, tmp_path, 2 * number, 2 * number + 2, every=0, sharded=sharded, shape=ADAPTED)
        part = slice(2 * number, 2 * number + 2)
        assert difference(found, part_of(wanted, part)) < 1e-10
    saved = Reader(tmp_path / "step-00000008").shapes
    assert saved == shapes_of(ADAPTED)
    assert len(saved) == 4 * 7 * 2


@pytest.mark.parametrize(
    ("saved", "other", "sentence"),
    [
        ("one", "another", "has adapters of other weights than tiny's, or with another lora.alpha or lora.dora"),
        ("one", "one", ""),
        (None, "one", ""),  # by an older hetctl: unknown
        ("one", None, ""),
    ],
)
def test_adapters_go_on_with_their_own_base_alone(
    tmp_path: Path, saved: str | None, other: str | None, sentence: str
) -> None:
    run(ONE, tmp_path, 0, 1, every=0, sharded="auto", shape=ADAPTED)
    manifest = tmp_path / "step-00000001/manifest.json"
    found = json.loads(manifest.read_text())
    assert found.pop("base") is None
    manifest.write_text(json.dumps(found | ({"base": saved} if saved else {})))
    reader = Reader(manifest.parent)
    if not sentence:
        reader.check_is_of(ADAPTED, whole=True, base=other)
    else:
        with pytest.raises(ConfigError, match=sentence):
            reader.check_is_of(ADAPTED, whole=True, base=other)


@pytest.mark.slow
def test_a_run_goes_through_every_layout_of_the_parity_tests(tmp_path: Path) -> None:
    """Each takes one step from the checkpoint of the one before, in an order of its own every time."""
    seed = int(time.time())
    names = [name for name, layout in LAYOUTS.items() if _samples(layout) == 8]
    random.Random(seed).shuffle(names)
    assert len(names) > 20
    wanted = reference(asked())
    for number, name in enumerate(names):
        chain, step = divmod(number, parity.STEPS)
        print(f"seed {seed}: step {step} of chain {chain} under {name}")  # shown when it fails
        found = run(LAYOUTS[name], tmp_path / str(chain), step, step + 1, every=0, sharded="auto")
        part = slice(step, step + 1)
        assert difference(found, part_of(wanted, part)) < 1e-10


def _samples(layout: Layout) -> int:
    return sum(pipe.micro_batch_size * pipe.micro_batches for pipe in layout.pipes)


def test_saving_while_training_changes_nothing(tmp_path: Path) -> None:
    quiet = run(SHARDS, tmp_path / "a", 0, 6)
    busy = run(SHARDS, tmp_path / "b", 0, 6, every=1)
    assert [t.losses for t in quiet] == [t.losses for t in busy]
    newest = [Reader(tmp_path / side / "step-00000006") for side in "ab"]
    for name in newest[0].shapes:
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(*(r.read(name, kind) for r in newest))


def test_a_checkpoint_is_whole_and_older_ones_go_once_every_host_has_named_its_part(tmp_path: Path) -> None:
    """Killed before that, a host that named none still has the one before, and so must all others."""
    (found,) = on_islands((1,), _saves_step_by_step, str(tmp_path))
    assert found == [[1, 2], [1], [2], [1, 2], [2, 3], [1, 2], [3], [1, 2, 3]]


def _saves_step_by_step(rank: int, folder: str) -> list[list[int]]:
    """Which checkpoints are there, and which were said to be whole: as the second is named, once all have met, as the
    third is named, at the end."""
    job = Job(plan_of(ONE, seq_len=SEQ_LEN), asked(), SHAPE, folder, None)
    trainer = build(job, rank_device(), training=UnevenSamples(job.plan.global_batch))
    saving = writer.Checkpoints(Path(folder), trainer.gradients, trainer.optimizer, keep=1, beyond=0)
    said: list[int] = []
    saving.on_commit = said.append
    found: list[list[int]] = []

    def note() -> None:
        time.sleep(0.2)  # older ones are removed beside the steps
        found.extend([[int(path.name[5:]) for path in listing.whole_ones(Path(folder))], list(said)])

    def name(step: int) -> None:
        saving.begin(step, updates=step)
        while not saving.written:
            time.sleep(0.01)
        saving.commit()
        note()

    saving.begin(1, updates=1)
    saving.finish()
    name(2)
    saving.met()
    note()
    name(3)
    saving.finish()
    note()
    trainer.batches.close()
    return found


def test_a_kill_at_any_step_of_a_commit_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before every file operation of a commit, in turn, SIGKILL; what is left loads and is step 2 or step 4."""
    run(ONE, tmp_path / "start", 0, 2)
    run(ONE, tmp_path / "start", 2, 4)
    whole = tmp_path / "start"
    wanted = {step: _state(whole / f"step-{step:08d}") for step in (2, 4)}
    seen: set[int] = set()
    for crash in range(100):
        folder = tmp_path / f"crash-{crash}"
        _uncommitted(whole, folder)
        survived = _commit_until(crash, folder / "step-00000004.partial")
        newest = listing.newest(folder)
        assert newest is not None
        step = Reader(newest).step
        seen.add(step)
        assert newest.name == f"step-{step:08d}"
        assert all(torch.equal(a, b) for a, b in zip(_state(newest), wanted[step], strict=True))
        if survived:
            break
    else:
        raise AssertionError("the commit never came to its end")
    assert seen == {2, 4}
    assert crash > 5
    run(ONE, tmp_path / "crash-0", 2, 4)  # what a kill left behind is in nobody's way
    again = _state(tmp_path / "crash-0" / "step-00000004")
    assert all(torch.equal(a, b) for a, b in zip(again, wanted[4], strict=True))


def _state(path: Path) -> list[torch.Tensor]:
    reader = Reader(path)
    return [reader.read(n, kind) for n in sorted(reader.shapes) for kind in ("master", "exp_avg", "exp_avg_sq")]


def _uncommitted(whole: Path, folder: Path) -> None:
    """Step 2 whole, step 4 as all ranks have written it and nobody has committed it."""
    import shutil

    shutil.copytree(whole / "step-00000002", folder / "step-00000002")
    partial = folder / "step-00000004.partial"
    shutil.copytree(whole / "step-00000004", partial)
    manifest = json.loads((partial / "manifest.json").read_text())
    (partial / "manifest.json").unlink()
    (partial / "part-00000.json").write_text(json.dumps({k: manifest[k] for k in ("files", "shapes")}))


def _commit_until(crash: int, partial: Path) -> bool:
    """Commit in a process that is killed before file operation number `crash`; True when it came to its end."""
    process = server().Process(target=_commit_or_die, args=(crash, partial))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _commit_or_die(crash: int, partial: Path) -> None:
    left = [crash]

    def counted(right: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return right(*args, **more)

        return call

    for name in ("replace", "fsync", "unlink", "rmdir", "open", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    writer.commit(partial, writer.Done(4, 4))
    writer.retire(partial.parent, 4, keep=1)


def test_a_flipped_byte_names_the_file_and_offers_the_checkpoint_before(tmp_path: Path) -> None:
    run(ONE, tmp_path, 0, 2)
    run(ONE, tmp_path, 2, 4)
    file = next((tmp_path / "step-00000004").glob("shard-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    reader = Reader(tmp_path / "step-00000004")
    with pytest.raises(ConfigError, match=file.name) as raised:
        _state(reader.path)
    assert "step-00000002" in raised.value.hint


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}'])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"not a checkpoint|another format"):
        Reader(tmp_path / "step-00000001")


def test_what_a_run_makes_anew_is_set_aside_not_taken_for_its_own(tmp_path: Path) -> None:
    run(ONE, tmp_path, 0, 2)
    run(ONE, tmp_path, 2, 4)
    old = {step: _state(tmp_path / f"step-{step:08d}") for step in (2, 4)}
    assert listing.set_aside(tmp_path, beyond=4) is None
    assert listing.set_aside(tmp_path, beyond=2) == tmp_path / "superseded-1"
    assert listing.newest(tmp_path) == tmp_path / "step-00000002"
    assert listing.set_aside(tmp_path, beyond=0) == tmp_path / "superseded-2"
    assert listing.newest(tmp_path) is None
    for number, step in ((1, 4), (2, 2)):
        kept = _state(tmp_path / f"superseded-{number}" / f"step-{step:08d}")
        assert all(torch.equal(a, b) for a, b in zip(kept, old[step], strict=True))


def slow_files(rank: int, folder: str, removing: bool) -> list[str]:
    """A run whose ranks take longer to tokenise, to write and to remove than an operation between ranks may take."""
    plan = plan_of(SHARDS, seq_len=SEQ_LEN)
    text = Path(folder) / "text"
    wanted = asked(validation_samples=8)
    data = replace(wanted.data, source=str(text), tokenizer="bytes", validation_share=0.3)
    train = replace(wanted.train, steps=1)
    job = Job(plan, replace(wanted, data=data, train=train), replace(SHAPE, vocab=300), f"{folder}/checkpoints")

    def slowly(right: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            time.sleep(LATE_SECONDS * rank)
            return right(*args, **more)

        return call

    if removing:
        writer.retire = lambda *args, **more: time.sleep(LATE_SECONDS)
    else:
        loop.open_sides, writer._write = slowly(loop.open_sides), slowly(writer._write)
    loop.run(job, torch.device("cpu"), Reporter(active=False))
    return [path.name for path in listing.whole_ones(Path(folder) / "checkpoints")]


@pytest.mark.parametrize("removing", [False, True])
def test_ranks_wait_for_slow_files_longer_than_for_each_other(tmp_path: Path, removing: bool) -> None:
    (tmp_path / "text").write_text("what a text says. " * 2000)
    found = on_islands((2,), slow_files, str(tmp_path), removing, timeout=LATE_SECONDS - 3)
    assert found == [["step-00000001"]] * 2
