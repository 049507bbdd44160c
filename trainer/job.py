"""The job of a run as every rank reads it: plan, recipe, shape and where to continue. One JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.values import decode, encode
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.recipe import Recipe

VARIABLE = "HETCTL_JOB"


@dataclass(frozen=True)
class Job:
    """Everything a rank needs beside its number and its placement."""

    plan: Plan
    recipe: Recipe
    shape: ModelShape
    checkpoints: str  # folder
    resume: str | None = None  # a checkpoint's path
    weights: str | None = None  # a Hugging Face folder to start from; None: random weights
    timeout_s: float = 120.0  # of one operation between ranks

    def to_json(self) -> str:
        return json.dumps(encode(self))


def current_job() -> Job:
    """The job of this process, from the file `HETCTL_JOB` names. Raises ConfigError."""
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(f"{VARIABLE} is not set", hint="ranks are started by `hetctl train`")
    return decode(Job, json.loads(Path(path).read_text(encoding="utf-8")), where=VARIABLE)
