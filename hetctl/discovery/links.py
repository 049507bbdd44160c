"""`discover --links`, `bench links`: latency and bandwidth between hosts, rail by rail, measured, not believed."""

from __future__ import annotations

import inspect
import re
import secrets
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract.cluster import (
    Cluster,
    Host,
    Island,
    IslandLink,
    Measured,
    Nic,
    TransportOption,
    load_cluster,
    native_way,
)
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.comm.contract.fabrics import RDMA_KINDS
from hetctl.comm.contract.ports import Side, sides
from hetctl.comm.contract.units import show_rate
from hetctl.console import Sink
from hetctl.discovery import traffic
from hetctl.discovery.inventory import InventoryHost, entries_of
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import Dialogue, converse
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.shell import Shell, run
from hetctl.probe.raw import printable

SECONDS = 1.0  # of traffic per rail and direction
PAIR_DEADLINE_S = 90.0
GOOD_SHARE = 0.8  # of what rails of the same NICs reach
_PORTS = range(20_000, 30_000)  # for perftest, which cannot choose one itself

Pair = tuple[str, str]
PerftestTool = Literal["ib_write_bw", "ib_write_lat"]
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]")


@dataclass(frozen=True)
class RailToMeasure:
    """One rail to measure: a NIC and an address at each end."""

    nics: tuple[str, str]
    addresses: tuple[str, str]
    devices: tuple[str | None, str | None] = (None, None)  # RDMA devices, where both ends have one
    carries_ip: bool = True  # False: the addresses are elsewhere, for an RDMA test to find its partner


def measure_links(
    cluster: Cluster, entries: Sequence[InventoryHost], *, timeout_s: float, sink: Sink | None = None
) -> Cluster:
    """The cluster with what was measured between its hosts, its links' TCP and RDMA rates replaced by it.

    `timeout_s` is for entering a host. The sink is told of each pair as it is known.
    """
    wanted = [entry for entry in entries if cluster.host_by_name[entry.name].status == "ok"]
    with Entrance() as entrance:
        entered = fan_out(wanted, entrance.open, deadline_s=timeout_s)
        shells = {o.item.name: o.value for o in entered if o.value is not None}
        pythons = {entry.name: entry.access.python for entry in wanted}

        def measure(pair: Pair, deadline: Deadline) -> list[Measured]:
            a, b = (RailEnd(cluster.host_by_name[name], shells[name], pythons[name]) for name in pair)
            return measure_pair(a, b, seconds=SECONDS, deadline=deadline)

        def look(pairs: Sequence[Pair]) -> Iterator[Measured]:
            for turn in rounds(pairs):
                for outcome in fan_out(turn, measure, deadline_s=PAIR_DEADLINE_S):
                    why = printable(outcome.error.message) if outcome.error else ""
                    said = outcome.value or [Measured(outcome.item, ("", ""), "tcp", problem=why or "no common way")]
                    if sink is not None:
                        sink.say(pair_line(outcome.item, said))
                    yield from said

        try:
            found = list(look(pairs_of(cluster, shells.keys())))
            if doubtful := list(dict.fromkeys(m.hosts for _, _, slow in rails_alike(found) for m in slow)):
                if sink is not None:
                    sink.say("what was slower than its like is measured again: a busy second is no slow link")
                found = _faster_of(found, look(doubtful))
        finally:
            for shell in shells.values():
                shell.close()
    if sink is not None and not found:
        sink.warn("there is no pair of hosts to measure between")
    return with_measured(cluster, found)


def measure_file(path: Path, *, timeout_s: float, sink: Sink) -> Cluster:
    """A cluster file with the links between its hosts measured now. Raises ConfigError where it has no hosts to ask."""
    cluster = load_cluster(path)
    entries = entries_of(cluster)
    if len(entries) < 2:
        raise ConfigError(f"{path} names fewer than two hosts that can be reached", hint="make it by hetctl discover")
    return measure_links(cluster, entries, timeout_s=timeout_s, sink=sink)


def rails_alike(rows: Iterable[Measured]) -> Iterator[tuple[float, list[Measured], list[Measured]]]:
    """(the middle one's bytes/s, all, the slow ones) of rails between the same NICs by the same tool."""
    alike: dict[tuple[str, Pair], list[Measured]] = defaultdict(list)
    for row in rows:
        alike[row.tool, row.nics].append(row)
    for group in alike.values():
        rated = [(m.rate_bytes_per_s, m) for m in group if m.rate_bytes_per_s is not None]
        usual = statistics.median([rate for rate, _ in rated] or [0.0])
        yield usual, group, [m for rate, m in rated if rate < GOOD_SHARE * usual]


def _faster_of(first: Sequence[Measured], second: Iterable[Measured]) -> list[Measured]:
    """Each rail of the first look, as the second one saw it where that was faster."""
    again = {(m.hosts, m.nics, m.tool): m for m in second}
    return [max(m, again.get((m.hosts, m.nics, m.tool), m), key=lambda x: x.rate_bytes_per_s or 0.0) for m in first]


def pairs_of(cluster: Cluster, reached: Iterable[str]) -> list[Pair]:
    """Which hosts to measure: between islands each host with a partner, inside an island each with its neighbour."""
    there = set(reached)
    pairs: dict[frozenset[str], Pair] = {}
    for a, b in combinations(cluster.islands, 2):
        left, right = ([h for h in i.hosts if h in there] for i in (a, b))
        for n in range(max(len(left), len(right)) if left and right else 0):
            pair = (left[n % len(left)], right[n % len(right)])
            pairs.setdefault(frozenset(pair), pair)
    for island in cluster.islands:
        own = [h for h in island.hosts if h in there]
        for pair in zip(own, own[1:] + own[:1], strict=True):
            pairs.setdefault(frozenset(pair), pair)
    return [pair for key, pair in pairs.items() if len(key) == 2]


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs in as few turns as come easily, no host twice in one: each measures alone."""
    turns: list[list[Pair]] = []
    for pair in pairs:
        for turn in turns:
            if not any(set(pair) & set(other) for other in turn):
                turn.append(pair)
                break
        else:
            turns.append([pair])
    return turns


def lanes_between(a: Host, b: Host) -> list[RailToMeasure]:
    """The rails two hosts have in common: NICs on one network, in order; else their data addresses."""
    lanes: list[RailToMeasure] = []
    for network in dict.fromkeys(n.network for n in a.nics if n.network):
        ours, theirs = ([n for n in h.nics if n.network == network] for h in (a, b))
        pairs = zip(ours, theirs, strict=False)
        lanes += [lane for x, y in pairs if (lane := _lane(x, y, (a.data_address, b.data_address))) is not None]
    if not any(lane.carries_ip for lane in lanes) and a.data_address and b.data_address:
        lanes.append(RailToMeasure(("", ""), (a.data_address, b.data_address)))
    return lanes


@dataclass(frozen=True)
class RailEnd:
    """A host that takes part in a measurement."""

    host: Host
    shell: Shell
    python: str

    def start(self, request: Mapping[str, Any], deadline: Deadline) -> Dialogue:
        """Our sender there, as a listener or a caller."""
        return converse(self.shell, self.python, inspect.getsource(traffic), request, deadline=deadline)


def measure_pair(a: RailEnd, b: RailEnd, *, seconds: float, deadline: Deadline) -> list[Measured]:
    """All rails between two hosts: RDMA ones by perftest where both have it, all of them over TCP by our sender."""
    lanes = lanes_between(a.host, b.host)
    found = [m for lane in lanes if all(lane.devices) if (m := _native(a, b, lane, deadline)) is not None]
    over_ip = [lane for lane in lanes if lane.carries_ip]
    return found + (_own(a, b, over_ip, seconds, deadline) if over_ip else [])


def with_measured(cluster: Cluster, found: Sequence[Measured]) -> Cluster:
    """The cluster with the measurements in it and in the links they speak for."""
    by_pair: dict[frozenset[str], list[Measured]] = {}
    for row in found:
        by_pair.setdefault(frozenset(row.hosts), []).append(row)
    links = tuple(_relinked(link, cluster, by_pair) for link in cluster.links)
    return replace(cluster, links=links, measured=tuple(found))


def _relinked(link: IslandLink, cluster: Cluster, by_pair: Mapping[frozenset[str], Sequence[Measured]]) -> IslandLink:
    a, b = (i for name in link.islands for i in cluster.islands if i.name == name)
    left, right = set(a.hosts), set(b.hosts)
    rows = {pair: rows for pair, rows in by_pair.items() if len(pair) == 2 and pair & left and pair & right}
    ways = [_rated(way, rows, cluster, (a, b)) for way in link.transports]
    tcp = next((way for way in ways if way.kind == "tcp"), None)
    if tcp is not None:  # files of older versions do not have it
        ways = [*(way for way in ways if way.kind != "native"), native_way(a, b, tcp)]
    return replace(link, transports=tuple(sorted(ways, key=lambda way: not way.usable)))


def _rated(
    way: TransportOption,
    rows: Mapping[frozenset[str], Sequence[Measured]],
    cluster: Cluster,
    islands: tuple[Island, Island],
) -> TransportOption:
    """A transport with measured figures: what the middle pair of hosts reached of its ports holds for them all."""
    if way.kind not in ("tcp", "rdma") or not rows:
        return way
    of_kind = [[m for m in pair if (m.tool == "tcp") == (way.kind == "tcp")] for pair in rows.values()]
    problem = next((f"{m.hosts[0]} to {m.hosts[1]}: {m.problem}" for pair in of_kind for m in pair if m.problem), None)
    if problem is not None and way.kind == "tcp":
        return replace(way, usable=False, reason=f"tried and failed: {problem}", rate_bytes_per_s=None, measured=True)
    rates = {pair: rate for pair, found in zip(rows, of_kind, strict=True) if (rate := _together(found)) is not None}
    if not rates:
        return way
    latency = [m.latency_s for pair in of_kind for m in pair if m.latency_s is not None]
    return replace(
        way,
        usable=True,
        reason=f"{way.reason if way.usable else 'reached all the same'}; measured between {len(rates)} pairs of hosts",
        rate_bytes_per_s=_of_all(rates, sides(cluster, *islands, way), islands),
        latency_s=statistics.median(latency) if latency else None,
        measured=True,
    )


def _of_all(
    rates: Mapping[frozenset[str], float], ends: tuple[Side, Side] | None, islands: tuple[Island, Island]
) -> float:
    """What all hosts carry at once, from pairs of them: limited by the island whose ports carry less."""
    if ends is None:
        return statistics.median(rates.values()) * min(len(island.hosts) for island in islands)
    ports = {**ends[0].hosts, **ends[1].hosts}
    reached = statistics.median(rate / min(ports[host] for host in pair) for pair, rate in rates.items())
    return reached * min(side.total for side in ends)


def _together(rows: Sequence[Measured]) -> float | None:
    """What all rails of a pair carry at once: measured so where there are several, else the one's rate."""
    whole = [m.rate_bytes_per_s for m in rows if m.nics == ("*", "*")] or [m.rate_bytes_per_s for m in rows]
    known = [rate for rate in whole if rate is not None]
    return sum(known) if known else None


def _lane(x: Nic, y: Nic, elsewhere: tuple[str | None, str | None]) -> RailToMeasure | None:
    """The rail between two NICs; an RDMA port without IP finds its partner at the hosts' data addresses."""
    rdma = x.kind in RDMA_KINDS and y.kind in RDMA_KINDS
    carries_ip = x.address is not None and y.address is not None
    ours, theirs = (x.address, y.address) if carries_ip else elsewhere
    if ours is None or theirs is None or not (carries_ip or rdma):
        return None
    devices = (x.rdma_device, y.rdma_device) if rdma else (None, None)
    return RailToMeasure((x.name, y.name), (ours, theirs), devices, carries_ip)


def _own(a: RailEnd, b: RailEnd, lanes: Sequence[RailToMeasure], seconds: float, deadline: Deadline) -> list[Measured]:
    """Our sender: the second host listens on its data addresses, the first one calls from its own."""
    names = (a.host.name, b.host.name)
    common = {"secret": secrets.token_hex(32), "deadline_s": deadline.left() + 5.0}
    deadline.phase = f"starting a listener on {names[1]}"
    with closing(b.start({**common, "listen": [lane.addresses[1] for lane in lanes]}, deadline)) as listener:
        ports = listener.receive(deadline=deadline)["ports"]
        rails = [
            {"address": lane.addresses[1], "port": int(port), "source": lane.addresses[0]}
            for lane, port in zip(lanes, ports, strict=True)
        ]
        deadline.phase = f"measuring {names[0]} to {names[1]}"
        with closing(a.start({**common, "rails": rails, "seconds": seconds}, deadline)) as caller:
            results = caller.receive(deadline=deadline)["rails"]
    return [_row(names, lanes, n, result) for n, result in enumerate(results)]


def _row(names: Pair, lanes: Sequence[RailToMeasure], n: int, result: Mapping[str, Any]) -> Measured:
    nics = lanes[n].nics if n < len(lanes) else ("*", "*")
    if "problem" in result:
        at = lanes[n].addresses[1] if n < len(lanes) else ""
        return Measured(names, nics, "tcp", problem=printable(f"{at}: {result['problem']}"))
    rate = min(float(result["send"]), float(result["receive"]))
    latency = float(result["latency_s"]) if "latency_s" in result else None
    return Measured(names, nics, "tcp", latency, rate)


def _native(a: RailEnd, b: RailEnd, lane: RailToMeasure, deadline: Deadline) -> Measured | None:
    """The rail by perftest; None where a host does not have it, or where it did not work: TCP is measured anyway."""
    try:
        rate = _perftest("ib_write_bw", a, b, lane, deadline)
        latency = _perftest("ib_write_lat", a, b, lane, deadline)
    except (HetctlError, ValueError):
        return None
    bandwidth = parse_bandwidth(rate)
    if bandwidth is None:
        return None
    return Measured((a.host.name, b.host.name), lane.nics, "ib_write_bw", parse_latency(latency), bandwidth)


def _perftest(tool: PerftestTool, a: RailEnd, b: RailEnd, lane: RailToMeasure, deadline: Deadline) -> str:
    port = secrets.choice(_PORTS)
    ours, theirs = lane.devices
    deadline.phase = f"running {tool} between {a.host.name} and {b.host.name}"
    with closing(b.shell.start(perftest_argv(tool, theirs or "", port), deadline=deadline)) as listener:
        listener.read(1.0)  # its heading: it listens, or it is not there
        done = run(a.shell, perftest_argv(tool, ours or "", port, server=lane.addresses[1]), deadline=deadline)
        return done.stdout.decode("utf-8", "replace") if done.exit_code == 0 else ""


def perftest_argv(tool: PerftestTool, device: str, port: int, *, server: str | None = None) -> list[str]:
    """perftest's command for one end: the listener without `server`, the caller with the listener's address.

    Raises ValueError for a device name that is none: it came from a host and goes into a command.
    """
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is not the name of an RDMA device")
    words = [tool, "-d", device, "-p", str(port), "-F"]
    words += (
        ["-s", "1048576", "-D", "2", "-b", "--report_gbits"] if tool == "ib_write_bw" else ["-s", "64", "-n", "1000"]
    )
    return words + ([server] if server else [])


def parse_bandwidth(text: str) -> float | None:
    """Bytes per second (average, per direction) from ib_write_bw -b --report_gbits; None when there is no table."""
    columns = _columns(text, "BW average")
    return float(columns[3]) * 1e9 / 8 / 2 if columns and len(columns) > 3 else None


def parse_latency(text: str) -> float | None:
    """The typical one-way latency in seconds from ib_write_lat; None when there is no table."""
    columns = _columns(text, "t_typical")
    return float(columns[4]) * 1e-6 if columns and len(columns) > 4 else None


def _columns(text: str, head: str) -> list[str] | None:
    """The numbers of the last row below the line that names `head`."""
    below = False
    found: list[str] | None = None
    for line in text.splitlines():
        if head in line:
            below = True
        elif below and _ROW.match(line):
            found = line.split()
    return found


def pair_line(pair: Pair, rows: Sequence[Measured]) -> str:
    """One line on a pair for people."""
    parts = []
    for row in rows:
        if row.problem:
            parts.append(f"failed: {row.problem}")
        else:
            lane = "all rails" if row.nics == ("*", "*") else "-".join(row.nics)
            latency = f", {row.latency_s * 1e6:.0f} us" if row.latency_s is not None else ""
            parts.append(f"{lane} {row.tool} {show_rate(row.rate_bytes_per_s)}{latency}")
    return f"{pair[0]} - {pair[1]}: {'; '.join(parts)}"
