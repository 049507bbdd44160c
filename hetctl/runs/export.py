"""From a run folder to a Hugging Face folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.values import decode
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.fetch import fetch
from hetctl.runs.manage import find_folder
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.data.megatron import is_megatron
from hetctl.trainer.job import Job
from hetctl.trainer.model.config import config_of
from hetctl.trainer.model.huggingface import SETTINGS, TOKENIZER_FILES, copy_beside, exported_config, write_model
from hetctl.trainer.recipe import TOKENIZER, DataSection

NO_CHECKPOINT = "name a run's folder, for example runs/latest; checkpoint.every says after how many steps one is saved"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export_run(word: str | None, to: Path, *, precision: str, sink: Sink) -> dict[str, Any]:
    """Write the newest checkpoint of a run (or the one that is named) to `to`. Raises HetctlError."""
    if to.exists() and not to.is_dir():
        raise ConfigError(f"'{to}' is not a folder", hint="a model is several files: name a new folder")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"'{to}' is not empty", hint="export to a new folder: nothing is overwritten")
    with saved_model(word, sink) as (path, job):
        return _export(path, job, to, precision=precision)


def _export(path: Path, job: Job, to: Path, *, precision: str) -> dict[str, Any]:
    reader = Reader(path)
    reader.check_is_of(job.shape, whole=True)
    names = list(reader.shapes)
    source = Path(job.weights) if job.weights else None
    name = NAMES[precision]
    config = exported_config(source, dtype=name) if source else config_of(job.shape, dtype=name)
    files = write_model(to, config, names, lambda n: reader.read(n, "master"), dtype=DTYPES[precision])
    beside = copy_beside(source, to, SETTINGS) if source else []
    beside += copy_tokenizer(job.recipe.data, source, to)
    return {
        "to": str(to.resolve()),
        "checkpoint": str(path),
        "step": reader.step,
        "parameters": sum(int(torch.Size(s).numel()) for s in reader.shapes.values()),
        "precision": precision,
        "files": [f.name for f in files] + ["config.json", *beside],
    }


@contextlib.contextmanager
def saved_model(word: str | None, sink: Sink) -> Iterator[tuple[Path, Job]]:
    """The newest checkpoint of a run, or the one that is named, and what its ranks were told. Raises HetctlError."""
    with _checkpoint(_meant(word), sink) as path:
        yield path, _job(path.parent.parent)


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
def _checkpoint(run: Path, sink: Sink) -> Iterator[Path]:
    """The checkpoint that is named, or a run's newest; one of hosts that share no folder is here as long as needed."""
    path = run.resolve()
    folder = RunFolder(path)
    newest = path if listing.is_whole(path) else listing.newest(folder.checkpoints)
    if newest is not None:
        yield newest
        return
    if not folder.prepared.is_file():
        raise ConfigError(f"'{run}' has no whole checkpoint", hint=NO_CHECKPOINT)
    with tempfile.TemporaryDirectory(prefix="fetched-", dir=path) as kept:
        fetched = fetch(folder, RunFolder(Path(kept)), sink)
        if fetched is None:
            raise ConfigError(f"'{run}' has no whole checkpoint", hint=NO_CHECKPOINT)
        yield fetched


def _job(run: Path) -> Job:
    file = RunFolder(run).launch / "job.json"
    try:
        return decode(Job, json.loads(file.read_text(encoding="utf-8")), where=file.name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{run}' is not a run's folder: {error}") from None
