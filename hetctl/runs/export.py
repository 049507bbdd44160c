"""From a run folder to a Hugging Face folder."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json
from hetctl.comm.contract.values import decode
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.fetch import fetch
from hetctl.runs.manage import find_folder
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.base import base_digest
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.data.megatron import is_megatron
from hetctl.trainer.job import Job
from hetctl.trainer.model.config import config_of
from hetctl.trainer.model.huggingface import (
    SETTINGS,
    TOKENIZER_FILES,
    WeightFiles,
    copy_beside,
    exported_config,
    write_model,
)
from hetctl.trainer.model.initial_weights import start_of, value_of
from hetctl.trainer.model.model import shapes_of
from hetctl.trainer.model.peft_files import ADAPTER_FILES, merged, write_adapters
from hetctl.trainer.recipe import TOKENIZER, DataSection

NO_CHECKPOINT = "name a run's folder, for example runs/latest; checkpoint.every says after how many steps one is saved"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export_run(
    word: str | None, to: Path, *, step: str | None = None, precision: str, merge: bool, sink: Sink
) -> dict[str, Any]:
    """Write the newest checkpoint of a run (or the one that is named, or of `step`) to `to`. Raises HetctlError.

    Adapters are written as PEFT's files, or merged into their base where asked to `merge`.
    """
    if to.exists() and not to.is_dir():
        raise ConfigError(f"'{to}' is not a folder", hint="a model is several files: name a new folder")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"'{to}' is not empty", hint="export to a new folder: nothing is overwritten")
    with saved_model(word, sink, step=step) as (path, job):
        return _export(path, job, to, precision=precision, merge=merge)


def _export(path: Path, job: Job, to: Path, *, precision: str, merge: bool) -> dict[str, Any]:
    if merge and job.shape.adapters is None:
        raise ConfigError(f"{path} has no adapters to merge", hint="it has whole weights: leave --merge out")
    reader, source = checked(path, job, merges=merge), Path(job.weights) if job.weights else None
    write = _write_adapters if job.shape.adapters and not merge else _write_model
    files = write(to, job, reader, precision)
    beside = copy_beside(source, to, SETTINGS) if source and write is _write_model else []
    beside += copy_tokenizer(job.recipe.data, source, to)
    return {
        "to": str(to.resolve()),
        "checkpoint": str(path),
        "step": reader.step,
        "parameters": job.shape.parameters if merge else sum(map(math.prod, reader.shapes.values())),
        "precision": precision,
        "files": [*files, *beside],
    }


@contextlib.contextmanager
def saved_model(word: str | None, sink: Sink, *, step: str | None = None) -> Iterator[tuple[Path, Job]]:
    """A run's newest checkpoint, the one that is named, or of a `step` (or `best`), and what its ranks were told.

    Raises HetctlError.
    """
    with _checkpoint(_meant(word), step, sink) as path:
        yield path, _job(path.parent.parent)


def _write_model(to: Path, job: Job, reader: Reader, precision: str) -> list[str]:
    source, name = Path(job.weights) if job.weights else None, NAMES[precision]
    config = exported_config(source, dtype=name) if source else config_of(job.shape, dtype=name)
    written = write_model(to, config, *whole_weights(job, reader), dtype=DTYPES[precision])
    return [*(f.name for f in written), "config.json"]


def checked(path: Path, job: Job, *, merges: bool) -> Reader:
    """The checkpoint, whole and of the run's model; where it `merges` adapters, of the weights that are there now."""
    reader, source = Reader(path), Path(job.weights) if job.weights else None
    merges = merges and job.shape.adapters is not None
    if merges and source and not source.is_dir():
        raise ConfigError(f"the weights to merge adapters into are gone: {source}", hint="put the folder back there")
    base = base_digest(job.shape, source, seed=job.recipe.train.seed) if merges else job.base
    reader.check_is_of(job.shape, whole=True, base=base)
    return reader


def whole_weights(job: Job, reader: Reader) -> tuple[Mapping[str, Sequence[int]], Callable[[str], torch.Tensor]]:
    """Shapes of a checkpoint's weights, and what reads one of them; adapters are merged into the weights they adapt."""
    read = partial(reader.read, kind="master")
    if not job.shape.adapters:
        return reader.shapes, read
    base = replace(job.shape, adapters=None)
    return shapes_of(base), partial(merged, shape=job.shape, base=_frozen(job, _base_files(job)), read=read)


def _base_files(job: Job) -> WeightFiles | None:
    return WeightFiles(Path(job.weights), job.shape) if job.weights else None


def _frozen(job: Job, files: WeightFiles | None) -> Callable[[str], torch.Tensor]:
    """What reads one frozen weight, whole, or makes it as each rank made it; what it comes to, if it is quantised."""
    about: dict[str, Any] = {"seed": job.recipe.train.seed, "dtype": torch.float32, "device": torch.device("cpu")}
    return lambda name: value_of(name, start_of(name, job.shape, files, **about), job.shape, torch.float32)


def _write_adapters(to: Path, job: Job, reader: Reader, precision: str) -> list[str]:
    base, read = job.weights or job.shape.name, partial(reader.read, kind="master")
    files = cache(partial(_base_files, job))  # opened where a weight is asked for, which few adapters' files need
    weight = lambda name: _frozen(job, files())(name)  # noqa: E731
    write_adapters(to, job.shape, reader.shapes, read, weight=weight, base=base, dtype=DTYPES[precision])
    return list(ADAPTER_FILES)


def copy_tokenizer(data: DataSection, source: Path | None, to: Path) -> list[str]:
    """The tokenizer that made the run's tokens, and no other: to its weights those ids would mean something else."""
    if data.tokenizer == "bytes":  # or nobody said what made Megatron's tokens: then it was the weights' own
        return copy_beside(source, to, TOKENIZER_FILES) if source and is_megatron(data.source) else []
    file = Path(data.tokenizer)
    if not file.is_file():
        return []
    shutil.copyfile(file, to / TOKENIZER)
    whole = file.name == TOKENIZER and (file.parent / "config.json").is_file()  # a model's folder: all of it belongs
    more = [name for name in TOKENIZER_FILES if name != TOKENIZER] if whole else []
    return [TOKENIZER, *copy_beside(file.parent, to, more)]


def _meant(word: str | None) -> Path:
    """The path that is named, the run of ./runs with that name, or (None) the newest. Raises ConfigError."""
    if word is None or (not Path(word).exists() and (Path("runs") / word / "launch").is_dir()):
        return find_folder(word).path
    return Path(word)


@contextlib.contextmanager
def _checkpoint(run: Path, step: str | None, sink: Sink) -> Iterator[Path]:
    """The checkpoint that is named, or a run's newest; one of hosts that share no folder is here as long as needed."""
    path = run.resolve()
    folder = RunFolder(path)
    if listing.is_whole(path) and step is not None:
        raise ConfigError(f"'{run}' is a checkpoint, and has no other steps", hint="--step is of a run")
    newest = path if listing.is_whole(path) else listing.newest(folder.checkpoints)
    if newest is not None:
        yield newest if step is None else listing.of_step(folder.checkpoints, step)
        return
    if not folder.prepared.is_file():
        raise ConfigError(f"'{run}' has no whole checkpoint", hint=NO_CHECKPOINT)
    with tempfile.TemporaryDirectory(prefix="fetched-", dir=path) as kept:
        fetched = fetch(folder, RunFolder(Path(kept)), sink, step=step)
        if fetched is None:
            of = f" of step {step}" if step else ""
            raise ConfigError(f"'{run}' has no whole checkpoint{of}", hint=NO_CHECKPOINT)
        yield fetched


def _job(run: Path) -> Job:
    file = RunFolder(run).launch / "job.json"
    try:
        return decode(Job, read_json(file), where=file.name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{run}' is not a run's folder: {error}") from None
