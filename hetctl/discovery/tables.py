"""A cluster for people: a line per host as it answers, then the tree of islands, hosts, GPUs and rails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from hetctl.comm.contract.cluster import Cluster, Device, Host, Island
from hetctl.comm.contract.units import count_of, listed, show_bytes, show_rate, show_seconds
from hetctl.console import Sink
from hetctl.discovery.fabric import Note, Report
from hetctl.probe.raw import printable

_MOST_NOTES = 30


def host_line(report: Report, width: int) -> str:
    """One line on one host: what it holds, or why that is unknown."""
    name = _safe(report.name).ljust(width)
    if report.facts is None:
        return f"[red]✗[/] {name}  {report.status}: {_safe(report.reason or '')}"
    products = Counter(
        (gpu.name or f"unknown {gpu.vendor} GPU") + " that cannot be used" * bool(gpu.problem)
        for gpu in report.facts.gpus
    )
    gpus = ", ".join(f"{n} x {_safe(name)}" for name, n in products.items()) or "no GPU"
    rdma = len({nic.rdma_device for nic in report.facts.nics if nic.rdma_device})
    nics = f", {count_of(rdma, 'RDMA device')}" if rdma else ""
    return f"[green]✓[/] {name}  {gpus}{nics}  [dim]{show_seconds(report.seconds)}[/]"


def show_cluster(sink: Sink, cluster: Cluster, notes: Sequence[Note]) -> None:
    """The tree of islands, how they can talk, what is unusual, and who was not reached."""
    sink.say()
    sink.say(cluster_tree(cluster))
    if cluster.links:
        sink.say(_links(cluster))
    _show_notes(sink, notes)


def cluster_tree(cluster: Cluster) -> Tree:
    """Islands, in each its hosts, in each its GPUs with their rails; then the hosts in no island."""
    ok = sum(host.status == "ok" for host in cluster.hosts)
    count = sum(len(island.members) for island in cluster.islands)
    tree = Tree(f"[bold]{_many(ok, 'host')}, {_many(count, 'device')}, {_many(len(cluster.islands), 'island')}[/]")
    by_name = cluster.host_by_name
    networks = {n.name: n for n in cluster.networks}
    for island in cluster.islands:
        network = networks.get(island.fabric)
        where = f"{_safe(island.fabric)}: {_safe(network.reason)}" if network else "within one host"
        branch = tree.add(f"[bold]{_safe(island.name)}[/]  {_many(len(island.members), 'device')}  [dim]{where}[/]")
        for name, devices in _by_host(island, by_name).items():
            at = f"  [dim]{_safe(by_name[name].data_address or 'no data address')}[/]"
            leaf = branch.add(f"{_safe(name)}{at}")
            for line in _device_lines(devices, by_name[name]):
                leaf.add(line)
    inside = {m.host for island in cluster.islands for m in island.members}
    for host in cluster.hosts:
        if host.name not in inside:
            tree.add(f"{_safe(host.name)}  [red]{host.status}[/]  {_safe(host.reason or 'no usable device')}")
    return tree


def _by_host(island: Island, hosts: dict[str, Host]) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = defaultdict(list)
    for member in island.members:
        found[member.host] += [d for d in hosts[member.host].devices if d.index == member.device]
    return found


def _device_lines(devices: Iterable[Device], host: Host) -> list[str]:
    """Devices that agree on everything but their number and rail share a line."""
    groups: dict[tuple[str, int | None], list[Device]] = defaultdict(list)
    for device in devices:
        groups[device.device_class, device.memory_bytes].append(device)
    rates = {nic.name: nic.rate_bytes_per_s for nic in host.nics}
    lines = []
    for (name, memory), group in groups.items():
        rails = ", ".join(f"{d.index}→{'+'.join(_safe(n) for n in d.nics) or '?'}" for d in group)
        speeds = sorted({show_rate(rates.get(n)) for d in group for n in d.nics})
        lines.append(f"{len(group)} x {_safe(name)} {show_bytes(memory)}  [dim]{rails} {', '.join(speeds)}[/]")
    return lines


def _links(cluster: Cluster) -> Table:
    heads = ("islands", "transport", "rate", "latency", "why")
    table = Table(*heads, box=None, pad_edge=False, title="how islands can talk", title_justify="left")
    for link in cluster.links:
        pair = f"{_safe(link.islands[0])} - {_safe(link.islands[1])}"
        for way in link.transports:
            mark = f"[green]✓[/] {way.kind}" if way.usable else f"[red]✗[/] {way.kind}"
            rate = show_rate(way.rate_bytes_per_s) + (" measured" * way.measured) if way.usable else ""
            latency = show_seconds(way.latency_s) if way.latency_s is not None else ""
            table.add_row(pair, mark, rate, latency, _safe(way.reason))
            pair = ""
    return table


def _show_notes(sink: Sink, notes: Sequence[Note]) -> None:
    """Unusual things; the same sentence about several hosts once."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for note in notes:
        hosts[note.sentence] += [note.host] if note.host is not None else []
    for sentence, who in list(hosts.items())[:_MOST_NOTES]:
        sink.warn(printable(f"{listed(who, 4)}: {sentence}" if who else sentence, limit=400))
    if len(hosts) > _MOST_NOTES:
        sink.warn(f"and {len(hosts) - _MOST_NOTES} more notes; all of them are in --json")


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _safe(text: str) -> str:
    """Text of a host: one line, no control characters, no markup."""
    return escape(printable(text))
