"""Which checkpoints a folder holds, and whether they are whole. No torch: the launcher's side looks too."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d+")


def is_whole(path: Path) -> bool:
    """Whether this folder is a committed checkpoint: the manifest comes last and the name after it."""
    return path.suffix == "" and (path / MANIFEST).is_file()


def whole_ones(folder: Path) -> list[Path]:
    """All whole checkpoints of a folder, oldest first."""
    return sorted((p for p in folder.glob("step-*") if is_whole(p)), key=lambda p: p.name)


def newest(folder: Path) -> Path | None:
    """The latest whole checkpoint of a folder, if there is one."""
    return next(reversed(whole_ones(folder)), None)


def set_aside(folder: Path, *, beyond: int) -> Path | None:
    """Move what a folder has of steps beyond one into a folder of its own, and return that; None if nothing was there.

    A run that begins at an earlier step makes those anew: they are of another training, and neither it nor the one who
    continues may take them for its own.
    """
    steps = {p: int(p.name.removeprefix("step-")) for p in folder.glob("step-*") if _NAME.fullmatch(p.name)}
    later = [path for path, step in steps.items() if step > beyond]
    if not later:
        return None
    apart = next(p for n in itertools.count(1) if not (p := folder / f"superseded-{n}").exists())
    apart.mkdir()
    for path in later:
        os.replace(path, apart / path.name)
    return apart


def previous(path: Path) -> Path | None:
    """The whole checkpoint before this one, if there is one."""
    return next((p for p in reversed(whole_ones(path.parent)) if p.name < path.name), None)
