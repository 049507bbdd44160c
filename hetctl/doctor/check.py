"""What a check is: what it reads, the pure rule that judges, the line to paste; and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetctl.comm.contract.cluster import Cluster, Host
from hetctl.comm.contract.facts import GpuFacts, HostFacts, Interpreter, NicFacts
from hetctl.comm.contract.natives import HOST, NATIVES
from hetctl.discovery.fabric import Report
from hetctl.doctor.verdict import State, Verdict, ok, worst

Level = Literal["quick", "perf", "pairs"]
Ports = Sequence[tuple[str, NicFacts]]  # host, port


@dataclass(frozen=True)
class ReachAttempt:
    """One attempt to reach a host's data address from another; `problem` '' when it worked."""

    source: str
    target: str
    address: str
    port: int | None = None
    problem: str = ""
    alive: bool = False  # it was not reached there, but something of the host answered
    largest_packet: bool | None = None  # a packet of the whole MTU came through unfragmented


@dataclass(frozen=True)
class FabricPath:
    """The way between two InfiniBand ports as their subnet tells it, beside the lesser of what its ends can."""

    source: str
    target: str
    way: str  # LID 5 to 12
    switches: tuple[str, ...] | None = None
    mtu: int | None = None
    rate_bytes_per_s: float | None = None
    end_mtu: int | None = None
    end_rate: float | None = None  # bytes per second
    problem: str = ""


@dataclass(frozen=True)
class CheckedCluster:
    """Everything known when rules are asked: what every host said, the cluster, and what was tried on it."""

    reports: tuple[Report, ...]
    cluster: Cluster
    tried: tuple[ReachAttempt, ...] | None = None  # None: not at this level
    paths: tuple[FabricPath, ...] = ()
    listening: Mapping[str, str] = field(default_factory=dict)  # host -> why it could not listen on a chosen port
    performance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # host -> what its devices did
    shared: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # folder -> host -> '' or what is wrong

    @property
    def facts(self) -> dict[str, HostFacts]:
        """The hosts that answered."""
        return {r.name: r.facts for r in self.reports if r.facts is not None}

    @property
    def ports(self) -> Ports:
        """Every port of theirs."""
        return [(host, port) for host, facts in self.facts.items() for port in facts.nics]

    @property
    def roce_ports(self) -> Ports:
        """The RoCE ports in use, not those that software makes."""
        real = ((h, p) for h, p in self.ports if p.rdma_device and not p.rdma_software)
        return [(h, p) for h, p in real if p.link_layer == "ethernet" and p.state == "active"]

    @property
    def cases(self) -> dict[str, HostCase]:
        """Each host as a rule sees it."""
        return {report.name: HostCase(report, self) for report in self.reports}

    @property
    def several(self) -> bool:
        return len(self.reports) > 1

    @property
    def groups(self) -> dict[str, dict[str, HostFacts]]:
        """Vendor -> the hosts that hold its GPUs, with the Python of its ranks; '' for hosts without any.

        Drift is judged inside these only.
        """
        found: dict[str, dict[str, HostFacts]] = {}
        for host, facts in self.facts.items():
            for vendor in dict.fromkeys(g.vendor for g in facts.gpus) or [""]:
                own = worker_python(facts, vendor)
                found.setdefault(vendor, {})[host] = replace(facts, interpreters=(own,) if own else ())
        return found


@dataclass(frozen=True)
class HostCase:
    """One host as a rule sees it."""

    report: Report
    checked: CheckedCluster

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def facts(self) -> HostFacts:
        assert self.report.facts is not None, "rules of hosts that did not answer ask for the report only"
        return self.report.facts

    @property
    def host(self) -> Host | None:
        return self.checked.cluster.host_by_name.get(self.name)

    @property
    def vendors(self) -> tuple[str, ...]:
        """Whose devices the cluster takes of it, HOST's its CPUs; of a host outside the cluster, whose GPUs it has."""
        devices = self.host.devices if self.host else self.gpus
        return tuple(dict.fromkeys(d.vendor for d in devices if d.vendor in NATIVES)) or (HOST,)

    @property
    def rdma_ports(self) -> list[NicFacts]:
        """RDMA ports with hardware below them or without, those that are switched off left out."""
        return [n for n in self.facts.nics if n.rdma_device and not switched_off(n)]

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        return self.facts.gpus


@dataclass(frozen=True)
class Check:
    """One thing to check. Exactly one of `rule` (per host) and `survey` (over all hosts) is given."""

    id: str
    reads: str
    source: str  # where the rule comes from
    fix: str = ""  # a line to paste; {host} and what the verdict brings are filled in
    level: Level = "quick"
    essential: bool = False  # unknown is then worth an exit code of its own
    rule: Callable[[HostCase], Verdict] | None = None
    survey: Callable[[CheckedCluster], Iterable[Verdict]] | None = None
    of_silent: bool = False  # also asked about hosts that gave no facts
    root: str = ""  # what root would add

    @property
    def theme(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Finding:
    """One check's result on one host (or pair, or group)."""

    check: str
    host: str
    state: State
    reason: str
    fix: str = ""
    essential: bool = False
    source: str = ""


def of_gpus(rule: Callable[[HostCase], Verdict]) -> Callable[[HostCase], Verdict]:
    """The rule, asked of hosts with GPUs only."""
    return lambda case: rule(case) if case.gpus else ok("no GPU here")


def over_networks(
    checked: CheckedCluster,
    networks: Mapping[str, Ports],
    judge: Callable[[Ports], Iterable[tuple[str, Verdict]]],
    *,
    otherwise: str,
) -> Iterator[Verdict]:
    """Of every host the worst that `judge` says of its ports; it sees all ports of a network at once."""
    found: dict[str, list[Verdict]] = {host: [] for host in checked.facts}
    for ports in networks.values():
        for host, verdict in judge(ports):
            found[host].append(verdict)
    for host, verdicts in found.items():
        fine = next((v.reason for v in verdicts if v.state == "ok" and v.reason), otherwise)
        yield replace(worst(verdicts, otherwise=fine), about=host)


def switched_off(nic: NicFacts) -> bool:
    """Whether a person turned the port off: no finding, whatever it looks like."""
    if nic.infiniband or nic.admin_up is None:
        return nic.physical_state == "disabled"
    return nic.admin_up is False  # drivers of RoCE call a port without a cable disabled, too


def worker_python(facts: HostFacts, vendor: str = "") -> Interpreter | None:
    """The Python that ranks would run on, those of a vendor's devices: the one named for it, else the host's own."""
    return min(facts.interpreters, key=lambda p: (vendor not in p.vendors, bool(p.vendors)), default=None)
