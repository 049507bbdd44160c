"""Half-made files go when a run's ranks are gone; whole ones, and other folders' files, stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

import pytest

from hetctl.launcher.agent.run_files import LOCK, SWEEP_FILE, own_folder, sweep_for
from hetctl.launcher.run_folder.folder import RunFolder


def test_only_what_is_half_made_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "odd [name]*")
    names = ("checkpoints/step-1/manifest.json", "launch/job.json", "logs/rank-0.log")
    halves = ("checkpoints/step-2.partial/shard", "checkpoints/gathered-step-1/shard", "launch/.new-x")
    other = tmp_path / "odd n" / "checkpoints" / "step-2.partial" / "shard"  # which the name would match as a pattern
    for path in (*(folder.path / n for n in (*names, *halves)), other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / SWEEP_FILE).write_text(json.dumps(folder.half_made))
    sweep_for(str(tmp_path))
    left = {p.relative_to(folder.path).as_posix() for p in folder.path.rglob("*") if p.is_file()}
    assert left == set(names)
    assert other.exists()
    sweep_for(str(tmp_path / "nowhere"))  # nothing was noted: nothing to do


LIVES = """
import sys
from hetctl.launcher.agent.run_files import own_folder
print(own_folder(), flush=True)
sys.stdin.read()
"""


def test_what_an_agent_left_that_was_killed_with_its_guardian_is_swept_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a short path: others are passed over for /tmp
        _next_sweeps(Path(name), monkeypatch)


def _next_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    agents = []
    for number in range(2):
        agents.append(subprocess.Popen([sys.executable, "-c", LIVES], stdin=PIPE, stdout=PIPE, text=True))
        folder, half = Path(agents[-1].stdout.readline().strip()), tmp_path / f"run-{number}" / "half"
        half.mkdir(parents=True)
        (folder / SWEEP_FILE).write_text(json.dumps([str(half)]))
    killed, lives = agents
    killed.kill()
    killed.wait()
    foreign = tmp_path / "hetctl-foreign"
    foreign.mkdir()
    (foreign / LOCK).touch()
    (foreign / SWEEP_FILE).write_text(json.dumps([str(tmp_path / "mine")]))
    (tmp_path / "mine").touch()
    if os.geteuid() == 0:
        os.chown(foreign, 12345, 12345)
    own = Path(own_folder())
    left = {p for p in tmp_path.glob("hetctl-*") if p not in (own, foreign)}
    assert len(left) == 1
    assert not (tmp_path / "run-0" / "half").exists()
    assert (tmp_path / "run-1" / "half").exists(), "its agent lives"
    assert os.geteuid() or (tmp_path / "mine").exists(), "somebody else's words are not swept by"
    lives.communicate()
