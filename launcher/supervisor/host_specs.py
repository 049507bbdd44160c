"""What each host's agent is given: its workers' programs and environments, the run's files, the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.agent.orders import Prepare, StoreOrder, WorkerOrder, packed
from hetctl.launcher.supervisor.agents import Agents, Site
from hetctl.launcher.supervisor.environment import HostShape, Seat, Setting, rank_settings
from hetctl.launcher.supervisor.launch import Launch
from hetctl.launcher.supervisor.supervisor import END_GRACE_S, LEASE_S


@dataclass(frozen=True)
class Work:
    """What every rank of a launch runs. `python` as the first word becomes the host's own, of the rank's vendor."""

    program: tuple[str, ...]
    files: Callable[[Site], Mapping[str, str]] = lambda site: {}  # variable -> what stands in the file that it names
    settings: tuple[Setting, ...] = ()  # beside those that the hosts' facts give
    cwd: str | None = None
    goes_on: bool = False  # with what an earlier attempt did


def host_specs(agents: Agents, launch: Launch, work: Work, *, run: str) -> dict[str, Prepare]:
    """What each host's agent is given, by name: one worker per seat, and the run's files. Raises ConfigError."""
    master = agents.site(launch.seats[0].host)
    settings, placement, secret = launch.settings(), launch.placement.to_json(), token_hex(16)
    specs = {}
    for site, host in zip(agents.sites, launch.hosts, strict=True):
        more = [*settings[site.name], *work.settings]
        more.append(Setting(variables.RUN, run, "what `hetctl clean` looks for"))
        more.append(Setting(variables.HOST, site.name, "this host's name in the plan"))
        more += [Setting(variables.SPREAD, "1", "the hosts share no run folder")] if agents.spread else []
        shape = HostShape(site.cores, launch.device_type, master.data_address, site.interface, site.code_path)
        texts = {**work.files(site), variables.PLACEMENT: placement}
        paths = {name: site.folder.launch / f"{name.removeprefix('HETCTL_').lower()}.json" for name in texts}
        specs[site.name] = Prepare(
            workers=tuple(_worker(site, shape, launch, seat, work, paths, more) for seat in launch.seats_of[site.name]),
            files={str(paths[name]): packed(text) for name, text in texts.items()},
            store=_store(site, shape, run, clients=len(launch.seats)) if site is master else None,
            probe_address=site.data_address if len(agents.sites) > 1 or not site.shared else None,
            secret=secret,
            private=None if site.shared else str(site.folder.path),
            reconnect=len(agents.sites) > 1 or not site.shared,
            flight=str(site.folder.flight),
            unheard=str(site.folder.launch / "unheard.json"),
            goes_on=work.goes_on,
            sweep=() if site.shared else site.folder.half_made,
            ports=tuple(launch.ports(host)),
            bundles=site.bundles,
            lease_s=LEASE_S,
            grace_s=END_GRACE_S,
        )
    return specs


def store_ports() -> tuple[int, ...]:
    """The ports the run's store may listen at: HETCTL_PORTS=29500-29520, else any free one. Raises ConfigError."""
    text = os.environ.get(variables.PORTS)
    if not text:
        return (0,)
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit() or not 0 < int(low) <= int(high or low) < 65536:
        raise ConfigError(f"{variables.PORTS}={text!r} is not a range of ports", hint="for example 29500-29520")
    return tuple(range(int(low), int(high or low) + 1))


def _worker(
    site: Site,
    shape: HostShape,
    launch: Launch,
    seat: Seat,
    work: Work,
    files: Mapping[str, Path],
    more: Sequence[Setting],
) -> WorkerOrder:
    files = {
        **files,
        "TORCHELASTIC_ERROR_FILE": site.folder.error_file(seat.rank),
        variables.FLIGHT: site.folder.flight,
    }
    seats, world_size = launch.seats_of[seat.host], len(launch.seats)
    settings = rank_settings(seats, seat, shape, world_size=world_size, files=files, more=more)
    environment = {s.name: s.value for s in settings}
    first, *words = work.program
    own = site.pythons.get(launch.vendor_of(seat), site.python)
    first = own if Path(first).name in ("python", "python3") else first
    return WorkerOrder(
        seat.rank, (first, *words), environment, str(site.folder.log(seat.rank)), site.program or work.cwd
    )


def _store(site: Site, shape: HostShape, run: str, *, clients: int) -> StoreOrder:
    program = (site.python, "-P", "-m", "hetctl.launcher.agent.store")
    environment = {variables.RUN: run, "PYTHONPATH": shape.code_path}
    return StoreOrder(site.data_address, store_ports(), program, environment, clients)
