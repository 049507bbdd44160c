"""Figures on boards: an event file that TensorBoard reads, W&B where it may log in, and boards that fail."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.metrics_writers import MetricsWriters


def events(folder: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of every scalar in a folder's event files, each record's checksum checked."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            body, check = data[12 : 12 + size], data[12 + size : 16 + size]
            assert int.from_bytes(check, "little") == masked_crc32c(body)
            event, data = Event.FromString(body), data[16 + size :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def record(step: int, **figures: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 5, "loss": 2.0 / step, "lr": 0.5, **figures}


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.mark.usefixtures("without_wandb")
def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    said: list[str] = []
    writers = MetricsWriters(RunFolder(tmp_path), {}, said.append)
    writers.begin(0)
    writers.step(record(1, grad_norm=None))
    writers.step(record(2, grad_norm=3.0, mfu=0.25, efficiency=0.5, islands={"a": {"step_s": 1.0}}))
    writers.end({"steps": 2, "validation_loss": 1.5})
    assert set(events(tmp_path / "tensorboard")) == {
        (1, "loss", 2.0),
        (1, "lr", 0.5),
        (2, "loss", 1.0),
        (2, "lr", 0.5),
        (2, "grad_norm", 3.0),
        (2, "mfu", 0.25),
        (2, "efficiency", 0.5),
        (2, "validation_loss", 1.5),
    }
    assert not said


def fake_wandb(told: list[Any], *, fails: bool = False) -> ModuleType:
    def log(figures: dict[str, float]) -> None:
        if fails:
            raise OSError("no route to host")
        told.append(figures)

    def init(**how: Any) -> Any:
        told.append(how["name"])
        return SimpleNamespace(log=log, define_metric=lambda *a, **k: None, finish=lambda: told.append("finished"))

    module = ModuleType("wandb")
    module.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    module.init = init  # type: ignore[attr-defined]
    return module


def test_wandb_gets_them_where_it_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(told))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said: list[str] = []
    writers = MetricsWriters(RunFolder(tmp_path), {}, said.append)
    writers.begin(0)
    writers.end({})
    assert told == []
    assert said == ["no figures for Weights & Biases: `wandb login`, or WANDB_MODE=offline"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    writers = MetricsWriters(RunFolder(tmp_path), {}, said.append)
    writers.begin(0)
    writers.step(record(1))
    writers.end({})
    assert told == [tmp_path.name, {"loss": 2.0, "lr": 0.5, "step": 1}, "finished"]


def test_a_board_that_fails_is_said_once_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb([], fails=True))
    monkeypatch.setenv("WANDB_MODE", "offline")
    writers = MetricsWriters(RunFolder(tmp_path), {}, said.append)
    writers.begin(0)
    writers.step(record(1))
    writers.step(record(2))
    writers.end({})
    assert said == ["Weights & Biases gets no more figures: OSError: no route to host"]
    assert [step for step, name, _ in events(tmp_path / "tensorboard") if name == "loss"] == [1, 2]


@pytest.mark.usefixtures("without_wandb")
def test_a_slow_board_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    monkeypatch.setattr("hetctl.runs.metrics_writers._tensorboard", lambda *_: opened.wait(20) and None)
    writers = MetricsWriters(RunFolder(tmp_path), {}, pytest.fail)
    writers.begin(0)
    writers.step(record(1))
    assert not opened.is_set()
    opened.set()
    writers.end({})


def test_the_event_file_costs_no_import_of_torch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.metrics_writers import MetricsWriters
writers = MetricsWriters(RunFolder(Path(sys.argv[1])), {}, sys.exit)
writers.begin(0)
writers.step({"step": 1, "loss": 0.5})
writers.end({})
print("torch" in sys.modules, flush=True)
import torch  # where it is wanted it can still be had
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert events(tmp_path / "tensorboard") == [(1, "loss", 0.5)]
