"""Checkpoints: safetensors parts and a JSON manifest with hashes, written in the background, committed by one rename.

Every element of masters and optimiser state is written once, by a rank that keeps it, under its parameter's Hugging
Face name and place, so that a checkpoint loads under any other plan.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hetctl.comm.contract.events import Step, present
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.units import GiB
from hetctl.comm.contract.values import encode
from hetctl.trainer.checkpoint.best import NONE_YET, BestSoFar
from hetctl.trainer.checkpoint.listing import BEGUN, MANIFEST, name_of, set_aside, whole_ones
from hetctl.trainer.checkpoint.per_host import Copier, leads, meet, spread
from hetctl.trainer.checkpoint.reader import FORMAT, Reader, sha256
from hetctl.trainer.gradients.eight_bit import MOMENTS, AdamW8bit
from hetctl.trainer.gradients.gradients import Gradients
from hetctl.trainer.gradients.loss_scale import LossScale
from hetctl.trainer.model.tensor_cuts import Cut

MASTER = "master"
MAX_FILE_BYTES = GiB


@dataclass(frozen=True)
class StatePart:
    """Elements [first, past) of one parameter's masters or optimiser state (of its `cut`, flat), on the host."""

    name: str
    kind: str
    first: int
    values: torch.Tensor
    cut: Cut

    @property
    def key(self) -> str:
        return f"{self.name}:{self.kind}:{self.first}"

    @property
    def entry(self) -> list[Any]:
        """What the manifest says of it: [name, kind, first, past], and which part of the parameter that counts in."""
        cut = [] if self.cut.is_whole else [self.cut.dim, self.cut.low, self.cut.high]
        return [self.name, self.kind, self.first, self.first + self.values.numel(), *cut]


@dataclass(frozen=True)
class Done:
    """How far a run is, as the manifest says it."""

    step: int
    updates: int
    loss_scale: LossScale | None = None  # of fp16
    base: str | None = None  # of adapters: see `base.py`
    best: BestSoFar = NONE_YET
    lately: tuple[Mapping[str, Any], ...] = ()  # figures of its last steps, which may have reached nobody


class Checkpoints:
    """Saves what this rank keeps; every rank calls the same methods after the same steps.

    The newest `keep` stay, and with `keep_best` that of the best validation too.
    `beyond` is the step of this folder's checkpoint that the run goes on from; those of later steps are `superseded`.
    `file_group` is a group whose operations may wait as long as files take.
    """

    def __init__(
        self,
        folder: Path,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
        beyond: int,
        keep_best: bool = False,
        base: str | None = None,
        file_group: Any = None,
        copier: Copier | None = None,
    ) -> None:
        self.base, self.keep_best = base, keep_best
        self.folder, self.gradients, self.optimizer, self.keep = folder, gradients, optimizer, keep
        self.copier, self._file_group = copier, file_group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Done, Future[None]] | None = None
        self._named: Done | None = None
        self._retiring: Future[None] | None = None
        self.superseded: Path | None = None
        self.on_commit: Callable[[int], object] = lambda step: None
        if leads():
            for left in folder.glob("step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)  # of a run that was killed
            self.superseded = set_aside(folder, beyond=beyond)
            if not beyond and spread():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / BEGUN).touch()
        meet(file_group)

    @property
    def written(self) -> bool:
        """Whether this rank's part of a pending save is on disk. What went wrong in writing is raised here."""
        if self._pending is None or not self._pending[1].done():
            return False
        self._pending[1].result()
        return True

    def begin(
        self,
        step: int,
        *,
        updates: int,
        loss_scale: LossScale | None = None,
        best: BestSoFar = NONE_YET,
        lately: Iterable[Step] = (),
    ) -> None:
        """Copy the state after `step` steps, and start writing it; a save still pending is finished first."""
        self._settle()
        parts = list(_snapshot(self.gradients, self.optimizer))
        shapes = {name: list(shape) for name, shape in self.gradients.whole_shapes().items()}
        done = Done(step, updates, loss_scale, self.base, best, tuple(map(present, lately)))
        self._pending = (done, self._thread.submit(self._keep, self._partial(step), parts, shapes))

    def _keep(self, partial: Path, parts: list[StatePart], shapes: dict[str, list[int]]) -> None:
        names = _write(partial, parts, shapes)
        if self.copier is not None:
            self.copier.exchange(partial, names)

    def commit(self) -> None:
        """All ranks have written: give the checkpoint its name (one rank does, or one on each host)."""
        assert self._pending is not None
        self._named, _ = self._pending
        self._pending = None
        if leads():
            commit(self._partial(self._named.step), self._named)

    def met(self) -> None:
        """All ranks have met since the last `commit`, so every host has named its part: it is said to be whole, and
        older ones, which a host that got no further would have gone on from, may go."""
        if self._named is None:
            return
        done, self._named = self._named, None
        if leads():
            best = done.best.step if self.keep_best else None
            self._retiring = self._thread.submit(retire, self.folder, done.step, keep=self.keep, best=best)
        self.on_commit(done.step)

    def finish(self) -> None:
        """Wait for a pending save on all ranks, commit it, and see the old ones off."""
        self._settle()
        if self._retiring is not None:
            self._retiring.result()
        meet(self._file_group)

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending[1].result()
            meet(self._file_group)
            self.commit()
        if self._named is not None:
            meet(self._file_group)
            self.met()

    def _partial(self, step: int) -> Path:
        return path_of(self.folder, step).with_suffix(".partial")


def path_of(folder: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return folder / name_of(step)


def load(path: Path, gradients: Gradients, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restore weights, masters and optimiser state; returns (steps, updates) done. Raises ConfigError.

    Every file that is read is checked against its hash first.
    """
    reader = Reader(path)
    with torch.no_grad():
        for bucket in gradients.buckets:
            for slot in bucket.layout.slots:
                gradients.assign(slot.name, reader.read(slot.name, MASTER, shape=slot.cut.whole))
        if isinstance(optimizer, torch.optim.AdamW) and reader.updates:
            _load_moments(reader, gradients, optimizer)
    return reader.step, reader.updates


def commit(partial: Path, done: Done) -> None:
    """The manifest, then the name: a crash before the rename leaves the checkpoints before this one as they were."""
    entries = sorted(partial.glob("part-*.json"))
    parts = [json.loads(entry.read_text()) for entry in entries]
    merged = {name: entry for part in parts for name, entry in part["files"].items()}
    shapes = {name: shape for part in parts for name, shape in part["shapes"].items()}
    for entry in entries:
        entry.unlink()
    write_json(partial / MANIFEST, {"format": FORMAT, **encode(done), "shapes": shapes, "files": merged})
    _sync(partial)
    os.replace(partial, partial.with_suffix(""))
    (partial.parent / BEGUN).unlink(missing_ok=True)
    _sync(partial.parent)


def retire(folder: Path, newest: int, *, keep: int, best: int | None = None) -> None:
    """Remove all checkpoints up to step `newest` but the last `keep` of these and the one of step `best`.

    Each loses its name first, so that none is whole in name only.
    """
    for old in [path for path in whole_ones(folder) if path.name <= name_of(newest)][:-keep]:
        if best is not None and old == path_of(folder, best):
            continue
        gone = old.with_suffix(".retired.partial")
        try:
            os.replace(old, gone)
        except OSError as error:  # it costs room, and the run goes on
            print(f"{old} could not be removed: {error}", flush=True)
        shutil.rmtree(gone, ignore_errors=True)


def _snapshot(gradients: Gradients, optimizer: torch.optim.Optimizer) -> Iterator[StatePart]:
    for bucket, slot, (first, _) in gradients.shards():
        if bucket.counts and slot.cut.counts:
            yield StatePart(slot.name, MASTER, first, _on_host(bucket.held_in(slot, lambda master: master)), slot.cut)
            for kind in MOMENTS:
                if kind in optimizer.state[bucket.pieces[0].master]:
                    state = bucket.held_in(slot, _state(optimizer, kind))
                    yield StatePart(slot.name, kind, first, _on_host(state), slot.cut)


def _state(optimizer: torch.optim.Optimizer, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda master: optimizer.state[master][kind]


def _on_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _load_moments(reader: Reader, gradients: Gradients, optimizer: torch.optim.AdamW) -> None:
    for bucket in gradients.buckets:
        for piece in bucket.pieces:
            on = piece.master.device if optimizer.defaults["fused"] else torch.device("cpu")
            state = optimizer.state[piece.master]
            state["step"] = torch.tensor(float(reader.updates), dtype=torch.float32, device=on)
            state.update((kind, torch.zeros_like(piece.master)) for kind in MOMENTS)
        for slot in bucket.layout.slots:
            if part := bucket.part_of(slot):
                for kind in MOMENTS:
                    held = slot.held_of(reader.read(slot.name, kind, shape=slot.cut.whole))
                    bucket.held_in(slot, _state(optimizer, kind)).copy_(held.reshape(-1)[slice(*part)])
        if isinstance(optimizer, AdamW8bit):
            for piece in bucket.pieces:
                optimizer.pack(piece.master)


def _write(partial: Path, parts: list[StatePart], shapes: dict[str, list[int]]) -> list[str]:
    """Write this rank's parts in files of about MAX_FILE_BYTES, and last the entry that says they are whole.

    Returns the files' names in that order.
    """
    partial.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    files: dict[str, Any] = {}
    for number, group in enumerate(_by_size(parts)):
        path = partial / f"shard-{rank:05d}-{number:04d}.safetensors"
        save_file({p.key: p.values for p in group}, str(path))
        _sync(path)
        tensors = {p.key: p.entry for p in group}
        files[path.name] = {"sha256": sha256(path), "tensors": tensors}
    entry = partial / f"part-{rank:05d}.json"
    write_json(entry, {"files": files, "shapes": shapes})
    return [*files, entry.name]


def _by_size(parts: list[StatePart]) -> Iterator[list[StatePart]]:
    group: list[StatePart] = []
    for part in parts:
        if group and sum(p.values.nbytes for p in group) + part.values.nbytes > MAX_FILE_BYTES:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
