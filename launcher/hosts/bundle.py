"""What travels to hosts: hetctl's own code with its links dereferenced, its entry point, and carried packages.

A bundle is a zip with fixed times and order, so that the same code always has the same digest, which is its name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import platform
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetctl.launcher.hosts.folder_files import REMADE, FolderFiles

ENTRY_POINT = "[torch.backends]\nhetctl = hetctl.comm.group.autoload:load\n"
METADATA = "Metadata-Version: 2.1\nName: hetctl-entry\nVersion: 0\n"
NEEDED = ("torch", "numpy", "safetensors")
CARRIED = ("safetensors",)  # stable-ABI packages that can stand in where a host lacks them
CARRIED_FOLDER = "carried"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Bundle:
    """A zip and the digest by which hosts keep it."""

    digest: str
    packed: bytes
    machine: str  # what carried binaries run on
    carried: tuple[str, ...] = ()


def code_bundle(package: Path) -> Bundle:
    """hetctl itself (`package` is the folder of the imported package), its entry point, and what it carries."""
    files = {f"hetctl/{name}": path.read_bytes() for name, path in _sources(package)}
    files["hetctl_entry-0.dist-info/METADATA"] = METADATA.encode()
    files["hetctl_entry-0.dist-info/entry_points.txt"] = ENTRY_POINT.encode()
    carried = []
    for name in CARRIED:
        found = dict(_stable(name))
        files |= {f"{CARRIED_FOLDER}/{path}": data for path, data in found.items()}
        carried += [name] if found else []
    return _packed(files, tuple(carried))


def folder_bundle(chosen: FolderFiles) -> Bundle:
    """What of a person's script folder travels."""
    return _packed({name: path.read_bytes() for name, path in chosen.files.items()})


def missing_packages(found: dict[str, str | None], bundle: Bundle, machine: str) -> tuple[list[str], bool]:
    """Which needed packages a host lacks for good, and whether it must use the carried ones."""
    lacking = [name for name in NEEDED if found.get(name) is None]
    helped = [name for name in lacking if name in bundle.carried and machine == bundle.machine]
    return [name for name in lacking if name not in helped], bool(helped)


def _sources(package: Path) -> Iterator[tuple[str, Path]]:
    """(name inside the package, file), links followed."""
    for entry in sorted(package.iterdir(), key=lambda p: p.name):
        if entry.is_dir() and entry.name not in REMADE:
            for name, path in _sources(entry):
                yield f"{entry.name}/{name}", path
        elif entry.is_file() and entry.suffix != ".pyc":
            yield entry.name, entry


def _stable(name: str) -> Iterable[tuple[str, bytes]]:
    """The files of an installed package, if its binaries use the stable ABI and so run on any Python."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    if any(p.suffix == ".so" and not p.name.endswith(".abi3.so") for p in paths):
        return []
    return [(f"{name}/{p.relative_to(folder).as_posix()}", p.read_bytes()) for p in paths]


def _packed(files: dict[str, bytes], carried: tuple[str, ...] = ()) -> Bundle:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), files[name], zipfile.ZIP_DEFLATED)
    packed = buffer.getvalue()
    return Bundle(hashlib.sha256(packed).hexdigest()[:24], packed, platform.machine(), carried)
