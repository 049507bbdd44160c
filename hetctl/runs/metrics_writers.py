"""Figures of a run for TensorBoard, and for Weights & Biases where that is installed and set up.

They are written where the run was started, so no rank's host needs the packages, or a way to the internet; and in a
thread of their own, because a slow board must not keep the supervisor from its hosts.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from hetctl.comm.operation.task_queue import TaskQueue
from hetctl.launcher.run_folder.folder import RunFolder

CLOSE_S = 60.0  # for what is still to be written, or to be sent somewhere
_FIGURES = (
    *("loss", "accuracy", "margin", "tokens_per_s", "step_time_s", "grad_norm", "lr", "loss_scale"),
    *("mfu", "efficiency"),
)


class MetricsWriter(Protocol):
    """Where figures go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriters:
    """All boards of one attempt of a run. One that fails is said and left; the run goes on."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._folder, self._config, self._say = folder, config, say
        self._boards: dict[str, MetricsWriter] = {}
        self._thread = TaskQueue("boards", lambda call: call())

    def begin(self, step: int) -> None:
        """The run goes on behind `step`: later figures of an earlier attempt no longer hold."""
        self._thread.put(partial(self._begin, step))

    def _begin(self, step: int) -> None:
        self._close()
        for name, make in (("TensorBoard", _tensorboard), ("Weights & Biases", _wandb)):
            self._try(name, partial(self._open, name, make, step))

    def _open(self, name: str, make: Callable[..., MetricsWriter | str | None], step: int) -> None:
        board = make(self._folder, self._config, step)
        if isinstance(board, str):
            self._say(board)
        elif board is not None:
            self._boards[name] = board

    def step(self, record: Mapping[str, Any]) -> None:
        """A step's figures."""
        figures = {k: float(record[k]) for k in _FIGURES if isinstance(record.get(k), int | float)}
        self._thread.put(partial(self._write, int(record["step"]), figures))

    def validated(self, step: int, loss: float | None) -> None:
        """The loss over held-out samples after a step."""
        if loss is not None:
            self._thread.put(partial(self._write, step, {"validation_loss": float(loss)}))

    def end(self, summary: Mapping[str, Any]) -> None:
        """What only the end of a run tells."""
        if (steps := summary.get("steps")) is not None:
            self.validated(int(steps), summary.get("validation_loss"))
        self._thread.put(self._close)
        self._thread.close(seconds=CLOSE_S)

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, board in list(self._boards.items()):
            self._try(name, partial(board.write, step, figures))

    def _close(self) -> None:
        for name, board in list(self._boards.items()):
            self._try(name, board.close)
        self._boards = {}

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # other people's packages, and a network behind one of them
            self._boards.pop(name, None)
            self._say(f"{name} gets no more figures: {type(error).__name__}: {str(error)[:200]}")


def _tensorboard(folder: RunFolder, config: Mapping[str, Any], step: int) -> MetricsWriter | str:
    if importlib.util.find_spec("tensorboardX") is None:
        return "no figures for TensorBoard: pip install tensorboardX"
    return _TensorBoard(folder, step)


class _TensorBoard:
    """An event file in the run's folder `tensorboard`."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        with _torch_hidden():
            from tensorboardX import SummaryWriter
        self._writer = SummaryWriter(logdir=str(folder.path / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """tensorboardX imports torch where it finds it, for tensors that nobody gives it here: seconds of every start."""
    hidden = sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as the import system documents
    try:
        yield
    finally:
        if hidden is None:
            del sys.modules["torch"]


def _wandb(folder: RunFolder, config: Mapping[str, Any], step: int) -> MetricsWriter | str | None:
    if importlib.util.find_spec("wandb") is None or os.environ.get("WANDB_MODE") == "disabled":
        return None
    if not _may_log_in():
        return "no figures for Weights & Biases: `wandb login`, or WANDB_MODE=offline"
    return _Wandb(folder, config)


def _may_log_in() -> bool:
    """Whether W&B would not ask for a key: it is offline, or has one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "offline":
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _Wandb:
    """A run in the project WANDB_PROJECT (or hetctl), the same one for all attempts of a run folder."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hetctl"),
            name=folder.name,
            id=folder.identity,
            resume="allow",
            dir=str(folder.path),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")  # its own counter never goes back, a resumed run does

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()
