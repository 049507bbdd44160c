"""Half-made files go when a run's ranks are gone; whole ones, and other folders' files, stay."""

from __future__ import annotations

import json
from pathlib import Path

from hetctl.launcher.agent.run_files import SWEEP_FILE, sweep_for
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
