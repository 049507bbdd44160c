"""The NIXL wheel with the system's RDMA libraries in the place of its own, which find no device driver on Debian.

A folder of links is made beside the wheel's files and imported from instead: nothing installed is touched. (Loading the
system's library globally before the wheel's works too, but the two then crash each other when the process ends. So
they do wherever the system has them, whatever the engine is used for.)
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

_OURS = ("libibverbs", "libmlx5")
_PROVIDERS = "/usr/lib64/libibverbs"  # where the wheel's own libraries look for drivers


@functools.cache
def use_the_systems_verbs() -> None:
    """Put the folder of links first in sys.path, unless the wheel's own libraries do or the system has none."""
    found = importlib.util.find_spec("nixl")
    system = {name: path for name in _OURS if (path := _path_of(f"{name}.so.1"))}
    if found is None or not found.origin or "libibverbs" not in system or os.path.isdir(_PROVIDERS):
        return
    folder = Path(tempfile.mkdtemp(prefix="hetctl-nixl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _link(Path(found.origin).parent.parent, folder, system)
    sys.path.insert(0, str(folder))


def _link(site: Path, folder: Path, system: dict[str, str]) -> None:
    """Folders are made anew and files linked: a library finds its neighbours by the path it was loaded by."""
    for part in site.iterdir():
        if not re.fullmatch(r"\.?nixl(_cu\d+|_rocm)?(\.libs|\.mesonpy\.libs)?", part.name) or not part.is_dir():
            continue
        for file in (p for p in part.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            place = folder / file.relative_to(site)
            place.parent.mkdir(parents=True, exist_ok=True)
            name = file.name.partition("-")[0]
            os.symlink(system.get(name, str(file)) if part.name.endswith(".libs") else str(file), place)


def _path_of(library: str) -> str | None:
    """Where the dynamic linker finds a library; None when it does not."""
    try:
        ctypes.CDLL(library)  # not global: nothing else sees it
    except OSError:
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        stem = library.partition(".so")[0]
        paths = [line.split()[-1] for line in maps if f"/{stem}.so" in line]
    return paths[0] if paths else None
