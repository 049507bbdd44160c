"""A NIXL wheel cut down to what UCX transfers need, unpacked: pack_nixl.py FOLDER WHEEL [NIXL_WHEEL].

For GPU machines that take few bytes and have no network: put FOLDER on PYTHONPATH there. Left out are the expert
kernels, every plugin but UCX's, and the libraries that only those need (object stores, Prometheus ...).
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def main(folder: Path, wheels: list[str]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(folder, [n for n in names if not _left_out(n)])
    libraries = {p.name: p for p in folder.rglob("*.so*") if p.parent.name.endswith(".libs")}
    needed, todo = set[str](), [p for p in folder.rglob("*.so*") if p.name not in libraries]
    while todo:
        content = todo.pop().read_bytes()
        for name in libraries.keys() - needed:
            if name.encode() in content:
                needed.add(name)
                todo.append(libraries[name])
    for name in libraries.keys() - needed:
        libraries[name].unlink()
    total = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{folder}: {total / 2**20:.1f} MiB, {len(needed)} libraries kept, {len(libraries) - len(needed)} left out")


def _left_out(name: str) -> bool:
    path = Path(name)
    top, file = path.parts[0], path.name
    if top.startswith("nixl_ep") or ".data" in top or ".scripts" in top or file.endswith((".la", ".a", ".h")):
        return True
    return file.startswith(("libplugin_", "libtelemetry_")) and file != "libplugin_UCX.so"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
