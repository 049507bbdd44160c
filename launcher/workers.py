"""This machine as a host of a run: its workers' specifications, and the paths that find hetctl's code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetctl.comm.files import write_atomically
from hetctl.launcher.environment import HostShape, Seat, rank_settings
from hetctl.launcher.runfolder import RunFolder
from hetctl.launcher.supervisor import HostSpec, code_root

ENTRY_POINT = "[torch.backends]\nhetctl = hetctl.comm.autoload:load\n"
METADATA = "Metadata-Version: 2.1\nName: hetctl-entry\nVersion: 0\n"


def local_host(
    seats: Sequence[Seat],
    argv: Sequence[str],
    folder: RunFolder,
    *,
    files: Mapping[str, Path],
    device_type: str,
    cwd: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> HostSpec:
    """What the agent on this machine is given: one worker per seat, all with the same program."""
    cores = len(os.sched_getaffinity(0))
    code = code_path(folder.launch / "site")
    host = HostShape(seats[0].host, cores, device_type, "127.0.0.1", "lo", code)
    workers = []
    for seat in seats:
        error_file = folder.error_file(seat.rank)
        error_file.unlink(missing_ok=True)
        own = {"TORCHELASTIC_ERROR_FILE": error_file, "HETCTL_FLIGHT_DIR": folder.flights}
        settings = rank_settings(seats, seat, host, files={**files, **own})
        workers.append(
            {
                "rank": seat.rank,
                "argv": list(argv),
                "env": {s.name: s.value for s in settings} | dict(extra or {}),
                "log": str(folder.log(seat.rank)),
                "cwd": str(cwd) if cwd else None,
            }
        )
    return HostSpec(host.name, tuple(workers), store_address=host.master_address)


def code_path(site: Path) -> str:
    """A PYTHONPATH that finds this very hetctl, and makes torch find its back end also where it is not installed.

    Torch loads the entry points of `torch.backends` from package metadata, so `site` holds a few lines of it.
    """
    metadata = site / "hetctl_entry-0.dist-info"
    write_atomically(metadata / "METADATA", METADATA)
    write_atomically(metadata / "entry_points.txt", ENTRY_POINT)
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(code_root()), str(site), *([inherited] if inherited else [])])
