"""What claims are judged on: the hosts, what discovery says of them, and the islands that ranks run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetctl.comm.contract.cluster import Cluster, load_cluster
from hetctl.comm.contract.facts import HostFacts
from hetctl.comm.contract.units import count_of
from hetctl.console import Sink
from hetctl.discovery.discover import HostAnswer, discover
from hetctl.discovery.fabric import build
from hetctl.discovery.inventory import InventoryHost, entries_of, this_machine
from hetctl.discovery.this_machine import this_machine as devices_here
from hetctl.discovery.which_cluster import HERE, Where, running_cluster
from hetctl.doctor.runner import options_for
from hetctl.launcher.supervisor.launch import Launch

ON_CPU = "cpu:2,cpu:1"  # unequal islands, the smallest with a native group of more than one rank


@dataclass(frozen=True)
class ClaimHosts:
    """Everything a claim may ask; travels to the claim's own process."""

    cluster: Cluster
    entries: tuple[InventoryHost, ...]
    facts: Mapping[str, HostFacts]  # of the hosts that answered
    silent: Mapping[str, str]  # host -> why it did not
    quick: bool
    timeout_s: float

    @property
    def kind(self) -> str:
        """The torch device type of its ranks."""
        return Launch.of(self.cluster).device_type

    def pairs(self, transport: str) -> list[Cluster]:
        """For each two vendors the first two islands that facts let talk so, as a cluster of their own."""
        found: dict[tuple[str, ...], Cluster] = {}
        for a, b in combinations(self.cluster.islands, 2):
            link = self.cluster.link(a.name, b.name)
            if link is not None and any(t.usable for t in link.transports if t.kind == transport):
                vendors = tuple(sorted((a.vendor, b.vendor)))
                found.setdefault(vendors, replace(self.cluster, islands=(a, b), links=(link,)))
        return list(found.values())

    def lacking(self, transport: str) -> str:
        """Why no two islands can talk over a transport, as the first pair's facts say; '' where some can."""
        if len(self.cluster.islands) < 2:
            return "there is only one island"
        if self.pairs(transport):
            return ""
        links = [self.cluster.link(a.name, b.name) for a, b in combinations(self.cluster.islands, 2)]
        reasons = [t.reason for link in links if link for t in link.transports if t.kind == transport]
        return reasons[0] if reasons else "nothing is known of how the islands can talk"


def find_ground(where: Where, *, quick: bool, timeout_s: float, sink: Sink) -> ClaimHosts:
    """The cluster of a file or an emulation, else this machine; its hosts are asked what they are."""
    if where == Where() and HERE.is_file():
        sink.warn("using ./cluster.yaml")
        where = Where(HERE)
    cluster = load_cluster(where.file) if where.file else None
    entries = (entries_of(cluster) if cluster else ()) or this_machine().entries  # an emulation stands on this machine
    sink.say(f"asking {count_of(len(entries), 'host')} what they are")
    answers = ask(entries, timeout_s)
    cluster = cluster or (running_cluster(where, sink) if where.emulate else _this_cluster(answers, sink))
    facts = {a.report.name: a.report.facts for a in answers if a.report.facts is not None}
    silent = {a.report.name: a.report.reason or a.report.status for a in answers if a.report.facts is None}
    for name, why in silent.items():
        sink.warn(f"{name} did not answer: {why}")
    return ClaimHosts(cluster, entries, facts, silent, quick, timeout_s)


def ask(entries: Sequence[InventoryHost], timeout_s: float) -> list[HostAnswer]:
    """What the hosts say to the doctor, and the vendors' second tools besides."""
    return discover(
        entries,
        timeout_s=min(60.0, timeout_s),
        options=lambda entry: replace(options_for(entry, ids=set(), folders=()), opinions=True),
    )


def _this_cluster(answers: list[HostAnswer], sink: Sink) -> Cluster:
    """This machine: its own islands where it has several, else its GPUs as two islands, else CPU processes."""
    found = build([a.report for a in answers]).cluster
    if len(found.islands) > 1:
        names = ", ".join(i.name for i in found.islands)
        sink.say(f"this machine has {len(found.islands)} islands of its own: {names}")
        return found
    machine, _ = devices_here([1])
    count = len(machine.memory_bytes) if machine.native != "gloo" else 0
    if count > 1:
        name = machine.device_class or "h200"
        spec = f"{name}:{count // 2},{name}:{count - count // 2}"
        sink.warn("nothing but this machine was named: its GPUs stand for two islands that may not talk natively")
    else:
        spec = ON_CPU
        sink.warn("nothing but this machine was named, and it has no two GPUs: CPU processes stand for two islands")
    return running_cluster(Where(None, spec), sink)
