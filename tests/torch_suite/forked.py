"""A pytest plugin: ranks of PyTorch's tests are forked from a server that has torch; importing it would be most of a
test's time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase

SERVER = torch.multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch", "torch.distributed.fsdp", "torch.testing._internal.distributed._tensor.common_dtensor"),
    "hetctl.comm.group.backend",
]
SERVER.set_forkserver_preload(PRELOADED)


def _process(target: Callable[..., None], args: tuple[object, ...], **more: object) -> object:
    return SERVER.Process(target=_in_environment, args=(dict(os.environ), target, *args), **more)


def _in_environment(environment: dict[str, str], target: Callable[..., None], *args: object, **more: object) -> None:
    """With the environment as it was when the test asked for ranks."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    target(*args, **more)


def _spawn(case: Any) -> None:
    case._start_processes(_process)


MultiProcessTestCase._spawn_processes = _spawn
