"""Which checkpoints a folder holds, and whether they are whole. No torch: the launcher's side looks too."""

from __future__ import annotations

from pathlib import Path

MANIFEST = "manifest.json"


def is_whole(path: Path) -> bool:
    """Whether this folder is a committed checkpoint: the manifest comes last and the name after it."""
    return path.suffix == "" and (path / MANIFEST).is_file()


def whole_ones(folder: Path) -> list[Path]:
    """All whole checkpoints of a folder, oldest first."""
    return sorted((p for p in folder.glob("step-*") if is_whole(p)), key=lambda p: p.name)


def newest(folder: Path) -> Path | None:
    """The latest whole checkpoint of a folder, if there is one."""
    return next(reversed(whole_ones(folder)), None)


def previous(path: Path) -> Path | None:
    """The whole checkpoint before this one, if there is one."""
    return next((p for p in reversed(whole_ones(path.parent)) if p.name < path.name), None)
