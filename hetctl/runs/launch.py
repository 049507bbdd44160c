"""What `train` and `run` share before ranks start: agents on the hosts of a cluster, over SSH, by Slurm, or here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.comm.contract.access import Access
from hetctl.comm.contract.cluster import Cluster, Host
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import NATIVE
from hetctl.comm.contract.plan import PlannedBridge, PlannedRail
from hetctl.console import Sink
from hetctl.launcher.hosts.bundle import code_bundle, folder_bundle
from hetctl.launcher.supervisor.agents import TargetHost, Agents, AgentRequest, start_agents, start_agent_here
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.supervisor.environment import Seat, Setting, host_settings, interface_of, ports_of
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.run_folder.registry import delist, enlist
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.hosts.shell import Shell
from hetctl.launcher.supervisor.supervisor import LEASE_S
from hetctl.launcher.supervisor.host_specs import this_site
from hetctl.runs.submit import check_allocation


@dataclass(frozen=True)
class Launch:
    """A cluster's hosts that seats are on, and how their shells are opened."""

    cluster: Cluster
    seats: tuple[Seat, ...]
    way: str = "ssh"  # or slurm: how hosts other than this machine are entered

    @property
    def hosts(self) -> list[Host]:
        names = list(dict.fromkeys(s.host for s in self.seats))
        return [self.cluster.host_by_name[n] for n in names]

    @property
    def here(self) -> bool:
        """Whether this machine is all there is: no SSH, no shipping."""
        here = all(h.access is None or h.access.local for h in self.hosts) and len(self.hosts) == 1
        return here and (self.way != "slurm" or self.cluster.source == "emulated")

    def ports(self, bridges: Sequence[PlannedBridge] = ()) -> Mapping[str, Sequence[dict[str, Any]]]:
        """Per host the network ports to watch."""
        where = {s.rank: s.host for s in self.seats}
        ends = [(where.get(r), n) for b in bridges for x in b.rails for r, n in _ends(x)]
        named = {h.name: [nic for host, nic in ends if host == h.name] for h in self.hosts}
        return {h.name: ports_of(self.cluster, h, self.seats, rails=named[h.name]) for h in self.hosts}

    def settings(self) -> Mapping[str, Sequence[Setting]]:
        """Per host what its facts and its owner say about its ranks' environment. Raises ConfigError."""
        return {h.name: host_settings(self.cluster, h, self.seats, environment=os.environ) for h in self.hosts}


def _ends(rail: PlannedRail) -> tuple[tuple[int, str], tuple[int, str]]:
    return (rail.from_rank, rail.from_nic), (rail.to_rank, rail.to_nic)


def say_unverified(bridges: Sequence[PlannedBridge], *, verify: bool, sink: Sink) -> None:
    """Where --verify-bridge has nothing to verify: the native library checks what it carries in its own way."""
    joined = [" and ".join(b.islands) for b in bridges if b.transport == NATIVE]
    if verify and joined:
        sink.warn(f"--verify-bridge checks nothing between {', '.join(joined)}: their own library joins them")


def start_agents_on(
    launch: Launch, folder: RunFolder, *, paths: Sequence[str] = (), program: Path | None = None, sink: Sink
) -> Agents:
    """Agents on all hosts of the launch. `paths` must be readable there; `program` is a folder to take along.

    Raises one HetctlError that names every host that cannot take part.
    """
    if launch.here:  # no SSH, nothing shipped
        site = this_site(launch.hosts[0].name, folder, code_root())
        enlist(folder.identity, folder.path, {site.name: Access()}, way=launch.way)
        return start_agent_here(site, str(code_root()))
    if launch.way == "local":
        raise ConfigError(f"--launcher local starts ranks here only, the cluster has {launch.hosts[0].name} and others")
    if launch.way == "slurm":
        check_allocation([h.name for h in launch.hosts], os.environ.get("SLURM_JOB_NODELIST", ""))
    token = folder.launch / "identity"
    orders = AgentRequest(
        run=folder.identity,
        lease_s=LEASE_S,
        code=code_bundle(code_root() / "hetctl"),
        program=folder_bundle(program) if program else None,
        token=(str(token), token.read_text(encoding="utf-8")),
        folder=folder,
        paths=tuple(paths),
    )
    open_shell, close = shell_opener(launch.way)
    try:
        targets = [target_of(host, open_shell) for host in launch.hosts]
        sink.say(f"entering {len(targets)} hosts")
        enlist(folder.identity, folder.path, {b.name: b.access for b in targets}, way=launch.way)
        agents = start_agents(targets, orders, on_refusal=lambda name, error: sink.warn(f"{name} cannot take part: {error}"))
    except BaseException:
        delist(folder.identity)
        close()
        raise
    agents.on_close = close
    return agents


def choose_way(asked: str) -> str:
    """ssh or slurm; `auto` is srun inside an allocation. `local` refuses whatever is not this machine."""
    if asked not in ("auto", "ssh", "slurm", "local"):
        raise ConfigError(f"--launcher {asked} is not known", hint="ssh, slurm or local")
    if asked == "auto":
        return "slurm" if os.environ.get("SLURM_JOB_ID") and shutil.which("srun") else "ssh"
    return asked


def store_ports() -> list[int]:
    """The ports the run's store may listen at: HETCTL_PORTS=29500-29520, else any free one. Raises ConfigError."""
    text = os.environ.get("HETCTL_PORTS")
    if not text:
        return [0]
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit() or not 0 < int(low) <= int(high or low) < 65536:
        raise ConfigError(f"HETCTL_PORTS={text!r} is not a range of ports", hint="for example 29500-29520")
    return list(range(int(low), int(high or low) + 1))


def code_root() -> Path:
    """The folder that holds the `hetctl` package: this very code."""
    import hetctl

    assert hetctl.__file__ is not None
    return Path(hetctl.__file__).parent.parent


def target_of(host: Host, open_shell: Callable[[Host, Deadline], Shell]) -> TargetHost:
    if host.access is None:
        raise ConfigError(
            f"the cluster file does not say how '{host.name}' is entered", hint="make it with `hetctl discover`"
        )
    if not host.data_address:
        raise ConfigError(
            f"the cluster file gives '{host.name}' no data_address, where its ranks would talk",
            hint="name one in the inventory, then run `hetctl discover` again",
        )
    opener = lambda deadline: open_shell(host, deadline)  # noqa: E731
    return TargetHost(host.name, host.access, opener, host.data_address, interface_of(host))


def shell_opener(way: str) -> tuple[Callable[[Host, Deadline], Shell], Callable[[], None]]:
    """How a shell on a host is opened, and what to close in the end."""
    if way == "slurm":
        from hetctl.launcher.hosts.srun import SrunShell

        return (lambda host, deadline: SrunShell(host.name)), (lambda: None)
    from hetctl.launcher.ssh import SshConfig, connect  # paramiko takes 0.2 s that a local run need not pay

    book = SshConfig()

    def enter(host: Host, deadline: Deadline) -> Shell:
        assert host.access is not None
        return LocalShell() if host.access.local else connect(host.access, book, deadline)

    return enter, book.close
