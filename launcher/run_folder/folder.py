"""A run's folder: where its plan, recipe, metrics, logs, checkpoints and summary are, and the link to the newest."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import finite, parse_json, read_json, write_atomically, write_json
from hetctl.launcher.run_folder.records import (
    FailureRecord,
    StepRecord,
    SummaryRecord,
    VersionsRecord,
    fitting,
)

PIECE = 1 << 16  # bytes looked at at a time
_LOG = re.compile(r"rank-([0-9]{1,6})\.log")


class _Inside:
    """The path of that name inside a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The names inside one run's folder."""

    path: Path

    plan = _Inside("plan.yaml")
    recipe = _Inside("recipe.yaml")
    metrics = _Inside("metrics.jsonl")
    events = _Inside("events.jsonl")
    summary = _Inside("summary.json")
    failure = _Inside("failure.json")
    report = _Inside("report.html")
    versions = _Inside("versions.json")  # of each host: Python, torch, CUDA or HIP, driver
    checkpoints = _Inside("checkpoints")
    launch = _Inside("launch")  # what ranks read: the job and the placement
    prepared = _Inside("launch/prepared.json")  # what was decided before it started: `hetctl resume` begins from it
    timeline = _Inside("launch/timeline.json")  # what each rank did when in the last step: what report.html draws
    predicted = _Inside("launch/predicted.json")  # the plan's simulated step
    text = _Inside("launch/text")  # the digest of the text that the run learns from
    flight = _Inside("logs")  # what each rank was doing when it failed: its flight recorder's file

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def half_made(self) -> tuple[str, ...]:
        """Patterns of what is of no use once no rank runs any more: checkpoints without a name, files without one."""
        folder = glob.escape(str(self.path))
        return (f"{folder}/checkpoints/*.partial", f"{folder}/checkpoints/gathered-*", f"{folder}/launch/.new-*")

    @property
    def identity(self) -> str:
        """The run's name on hosts: made once, kept in the folder, so that a resumed run finds its own files there."""
        file = self.launch / "identity"
        if not file.is_file():
            write_atomically(file, f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self.name)}-{secrets.token_hex(4)}")
        return file.read_text(encoding="utf-8").strip()

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def logs(self) -> dict[int, Path]:
        """Rank -> the log that is there; not copies that somebody made beside them."""
        named = ((_LOG.fullmatch(path.name), path) for path in self.path.glob("logs/rank-*.log"))
        return {int(name[1]): path for name, path in named if name}

    def error_file(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.error.json"

    def append_metrics(self, record: dict[str, Any]) -> None:
        """One object per step, one line each."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def append_event(self, event: dict[str, Any]) -> None:
        """What happened beside the steps, one object a line, with the seconds since the epoch."""
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite({"at": time.time(), **event}), allow_nan=False) + "\n")

    def cut_torn_lines(self) -> None:
        """Cut off what a launcher that was killed had half written, so that the next line does not run into it."""
        for path in (self.metrics, self.events):
            if path.is_file():
                _cut_torn_line(path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The steps' figures in order; of steps that were made anew, from an earlier checkpoint, the later ones.

        Lines that are of no step (disks fill up, people edit) are passed over.
        """
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        found: list[dict[str, Any]] = []
        for line in lines[:-1]:  # what follows the last newline is being written, or was cut
            record = _record(line)
            if record is None:
                continue
            while found and found[-1]["step"] >= record["step"]:
                found.pop()
            found.append(record)
        return found

    def progress(self) -> dict[str, Any]:
        """How far its metrics say it came, and with what losses; None where there is no step yet."""
        metrics = self.read_metrics()
        return {
            "steps": metrics[-1]["step"] if metrics else 0,
            "first_loss": metrics[0].get("loss") if metrics else None,
            "last_loss": metrics[-1].get("loss") if metrics else None,
            "tokens": sum(m.get("tokens", 0) for m in metrics),
        }

    def read_summary(self) -> dict[str, Any]:
        """What its last attempt came to; empty where none has ended, or the file is not whole."""
        return _object(SummaryRecord, self.summary)

    def read_failure(self) -> dict[str, Any]:
        """What failed first; empty where nothing did, or the disk kept the file not whole: the summary says why too."""
        return _object(FailureRecord, self.failure)

    def read_versions(self) -> dict[str, Any]:
        """What each host computes with; empty where its ranks never began."""
        try:
            return dict(fitting(VersionsRecord, {"hosts": read_json(self.versions)}).get("hosts", {}))
        except (OSError, ValueError):
            return {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)


def runs_here() -> list[Path]:
    """The folders of ./runs that hold a run, `latest` among them."""
    return [path for path in Path("runs").glob("*/") if (path / "launch").is_dir()]


def create_run(directory: Path | None, label: str) -> RunFolder:
    """A new folder `runs/<time>-<label>` with `runs/latest` pointing at it, or `directory` itself.

    Raises ConfigError when the folder cannot be made, or holds a person's files of a run's names.
    """
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(directory.resolve())
            if not folder.launch.is_dir() and (own := [p.name for p in (folder.recipe, folder.plan) if p.exists()]):
                why = f"{folder.path} holds a {own[0]} that no run wrote, and a run there would replace it"
                raise ConfigError(why, hint="name a folder of the run's own with --run-dir")
            return folder
        base = Path("runs").absolute()
        base.mkdir(exist_ok=True)
        path = _fresh(base, f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label).strip('-.')}")
        _point(base / "latest", path.name)
    except OSError as error:
        raise ConfigError(f"the run folder cannot be made: {error}", hint="choose another with --run-dir") from None
    return RunFolder(path)


def _record(line: str) -> dict[str, Any] | None:
    """One step's figures; None for a line that is no object, or does not say of which step it is."""
    try:
        return fitting(StepRecord, parse_json(line)) or None
    except ValueError:
        return None


def _cut_torn_line(path: Path) -> None:
    """Shorten a file to its last newline."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - PIECE)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        file.truncate(end)


def _fresh(base: Path, name: str) -> Path:
    for number in range(1000):
        path = base / (f"{name}-{number}" if number else name)
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise ConfigError(f"{base} already holds a thousand runs named {name}")


def _point(link: Path, target: str) -> None:
    if link.exists() and not link.is_symlink():
        return  # a person put something there: leave it
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _object(kind: type[Any], file: Path) -> dict[str, Any]:
    try:
        return fitting(kind, read_json(file))
    except (OSError, ValueError):
        return {}
