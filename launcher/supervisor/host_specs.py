"""What each host's agent is given: its workers' programs and environments, the run's files, the store."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetctl.comm.contract.files import write_atomically
from hetctl.comm.operation.recorder import VARIABLE as FLIGHT_VARIABLE
from hetctl.launcher.hosts.bundle import ENTRY_POINT, METADATA
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.environment import RUN_VARIABLE, HostShape, Seat, Setting, rank_settings
from hetctl.launcher.supervisor.site import Site
from hetctl.launcher.supervisor.supervisor import HostSpec

STORE_BOOT = "import sys;sys.path.insert(0,sys.argv.pop(1));from hetctl.launcher.agent.store import main;main()"
SPREAD_VARIABLE = "HETCTL_SPREAD"
STORE_PORTS = (0,)  # any free one, unless a range is declared

Files = Callable[[Site], Mapping[str, tuple[Path, str]]]  # variable -> (path, text) of a file the ranks read


def host_specs(
    sites: Sequence[Site],
    seats: Sequence[Seat],
    program: Sequence[str],
    *,
    run: str,
    files: Files,
    device_type: str,
    settings: Mapping[str, Sequence[Setting]] | None = None,
    cwd: str | None = None,
    store_ports: Sequence[int] = STORE_PORTS,
    spread: bool = False,
    ports: Mapping[str, Sequence[dict[str, Any]]] | None = None,
    goes_on: bool = False,
) -> list[HostSpec]:
    """One HostSpec per site, one worker per seat. `program` with `python` first gets the host's own interpreter."""
    master = next(s for s in sites if s.name == seats[0].host)
    specs = []
    for site in sites:
        shape = HostShape(site.name, site.cores, device_type, master.data_address, site.interface, site.code_path)
        written = files(site)
        more = [*(settings or {}).get(site.name, ()), Setting(RUN_VARIABLE, run, "what `hetctl clean` looks for")]
        more.append(Setting("HETCTL_HOST", site.name, "this host's name in the plan"))
        more += [Setting(SPREAD_VARIABLE, "1", "the hosts share no run folder")] if spread else []
        workers = tuple(
            _worker(site, shape, seats, seat, program, {n: p for n, (p, _) in written.items()}, more, cwd)
            for seat in seats
            if seat.host == site.name
        )
        specs.append(
            HostSpec(
                site.name,
                workers,
                site.data_address,
                files={str(path): text for path, text in written.values()},
                store=_store(site, shape, run, store_ports) if site is master else None,
                private=None if site.shared else str(site.folder.path),
                reconnect=len(sites) > 1 or not site.shared,
                flight=str(site.folder.flight),
                unheard=str(site.folder.launch / "unheard.json"),
                goes_on=goes_on,
                ports=tuple((ports or {}).get(site.name, ())),
                sweep=() if site.shared else site.folder.half_made,
            )
        )
    return specs


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


def _worker(
    site: Site,
    shape: HostShape,
    seats: Sequence[Seat],
    seat: Seat,
    program: Sequence[str],
    files: Mapping[str, Path],
    more: Sequence[Setting],
    cwd: str | None,
) -> dict[str, object]:
    files = {
        **files,
        "TORCHELASTIC_ERROR_FILE": site.folder.error_file(seat.rank),
        FLIGHT_VARIABLE: site.folder.flight,
    }
    environment = {s.name: s.value for s in rank_settings(seats, seat, shape, files=files, more=more)}
    first = site.python if Path(program[0]).name in ("python", "python3") else program[0]
    return {
        "rank": seat.rank,
        "argv": [first, *program[1:]],
        "env": environment,
        "log": str(site.folder.log(seat.rank)),
        "cwd": site.program or cwd,
    }


def _store(site: Site, shape: HostShape, run: str, ports: Sequence[int]) -> dict[str, object]:
    return {
        "store_address": site.data_address,
        "store_ports": list(ports),
        "store_argv": [site.python, "-c", STORE_BOOT, site.code_path.split(os.pathsep)[0]],
        "store_env": {RUN_VARIABLE: run, "PYTHONPATH": shape.code_path},
    }
