"""Which checkpoints a folder holds, and whether they are whole. No torch: the launcher's side looks too."""

from __future__ import annotations

from pathlib import Path

MANIFEST = "manifest.json"


def is_whole(path: Path) -> bool:
    """Whether this folder is a committed checkpoint: the manifest comes last and the name after it."""
    return path.suffix != ".partial" and (path / MANIFEST).is_file()


def newest(folder: Path) -> Path | None:
    """The latest whole checkpoint of a folder, if there is one."""
    return max((p for p in folder.glob("step-*") if is_whole(p)), default=None, key=lambda p: p.name)
