"""One host as a run finds it: its interpreter, its code, its view of the run folder, the address where ranks talk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.files import write_atomically
from hetctl.launcher.hosts.bundle import ENTRY_POINT, METADATA
from hetctl.launcher.run_folder.folder import RunFolder


@dataclass(frozen=True)
class Site:
    """Where the ranks of one host live."""

    name: str
    python: str
    code_path: str  # PYTHONPATH that finds hetctl and its entry point
    folder: RunFolder  # the run's files as this host sees them
    shared: bool  # whether that is the launcher's own folder
    cores: int
    data_address: str
    interface: str | None  # that holds the data address; None: unknown
    program: str | None = None  # where a shipped program folder is
    checkpoints: tuple[str, ...] = ()  # names of the whole checkpoints it holds


def this_site(name: str, folder: RunFolder, code: Path) -> Site:
    """This machine, for ranks that talk among themselves."""
    cores = len(os.sched_getaffinity(0))
    return Site(name, sys.executable, code_path(code, folder.launch / "site"), folder, True, cores, "127.0.0.1", "lo")


def code_path(root: Path, site: Path) -> str:
    """A PYTHONPATH that finds this very hetctl, and makes torch find its back end also where it is not installed.

    Torch loads the entry points of `torch.backends` from package metadata, so `site` holds a few lines of it.
    """
    metadata = site / "hetctl_entry-0.dist-info"
    write_atomically(metadata / "METADATA", METADATA)
    write_atomically(metadata / "entry_points.txt", ENTRY_POINT)
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(root), str(site), *([inherited] if inherited else [])])
