"""The job of a run as every rank reads it: plan, recipe, shape and where to continue. One JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.comm.contract import variables
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.values import encode
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """Everything a rank needs beside its number and its placement."""

    plan: Plan
    recipe: Recipe
    shape: ModelShape
    checkpoints: str  # folder; a relative path is from the run's folder, so that one file is for all hosts
    resume: str | None = None  # a checkpoint's path, likewise
    weights: str | None = None  # a Hugging Face folder to start from; None: random weights
    base: str | None = None  # what its adapters are adapters of: see `checkpoint/base.py`
    timeout_s: float = 120.0  # of one operation between ranks
    first_steps: int | None = None  # that are made, of the recipe's; None: all

    def to_json(self) -> str:
        return json.dumps(encode(self))


def current_job() -> Job:
    """The job of this process, from the file `HETCTL_JOB` names. Raises ConfigError."""
    job = variables.read_named(variables.JOB, Job)
    folder = Path(os.environ[variables.JOB]).parent.parent
    resume = str(folder / job.resume) if job.resume else None
    return replace(job, checkpoints=str(folder / job.checkpoints), resume=resume)
