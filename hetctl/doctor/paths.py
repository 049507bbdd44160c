"""Routes through InfiniBand subnets: what `ibtracert` and the subnet's administration say of ways between ports."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetctl.comm.contract.facts import NicFacts
from hetctl.comm.contract.units import count_of, listed, show_rate
from hetctl.doctor.check import Check, CheckedCluster, FabricPath
from hetctl.doctor.subnet import subnets
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn
from hetctl.probe.raw import printable
from hetctl.probe.words import integer

# PathRecord's codes (InfiniBand specification 15.2.5.16; enum ib_rate of the kernel) -> Gbit/s
_RATES = {2: 2.5, 3: 10, 4: 30, 5: 5, 6: 20, 7: 40, 8: 60, 9: 80, 10: 120, 11: 14, 12: 56, 13: 112, 14: 168, 15: 25}
_RATES |= {16: 100, 17: 200, 18: 300, 19: 28, 20: 50, 21: 400, 22: 600, 23: 800}
_MTUS = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
_LOST = "can't find a route"  # ibtracert's words
_PERMISSION = re.compile(r"ermission|open UMAD port|umad_open_port|Failed to open")


def ways_to_trace(checked: CheckedCluster) -> dict[str, list[tuple[str, NicFacts, NicFacts]]]:
    """Host -> (another host, port here, port there): in each subnet to the next host, port by port in their order."""
    found: dict[str, list[tuple[str, NicFacts, NicFacts]]] = {}
    for ports in subnets(checked, "active").values():
        each: dict[str, list[NicFacts]] = defaultdict(list)
        for host, port in ports:
            if port.lid and not port.virtual_function:
                each[host].append(port)
        names = list(each)
        for here, there in zip(names, names[1:] + names[:1], strict=True):
            if here != there:
                found.setdefault(here, []).extend((there, a, b) for a, b in zip(each[here], each[there], strict=False))
    return found


def question(here: NicFacts, there: NicFacts) -> dict[str, object]:
    """What the program on a host is asked for one way."""
    return {"device": here.rdma_device, "port": here.rdma_port, "from": here.lid, "to": there.lid}


def traced(source: str, target: str, ports: tuple[NicFacts, NicFacts], said: Mapping[str, Any]) -> FabricPath:
    """One way as two tools told it; why nothing is known where neither did."""
    route, record = str(said.get("route", "")), str(said.get("record", ""))
    mtu, rate = parse_record(record)
    known = parse_route(route) is not None or (mtu is not None and _LOST not in route)
    problem = "" if known else _problem(f"{route}\n{record}")
    least = [p.rate_bytes_per_s for p in ports if p.rate_bytes_per_s]
    sizes = [p.rdma_mtu for p in ports if p.rdma_mtu]
    way = f"LID {ports[0].lid} to {ports[1].lid}"
    wanted = (min(sizes, default=None), min(least, default=None))
    return FabricPath(source, target, way, parse_route(route), mtu, rate, *wanted, problem)


def parse_route(text: str) -> tuple[str, ...] | None:
    """The switches of `ibtracert`'s lines `[1] -> switch port {0x...}[1] lid 4-4 "name"`; None if it did not arrive."""
    if not re.search(r"^To \w+ \{", text, re.MULTILINE):
        return None
    rows = re.findall(r"-> switch port \{(0x[0-9a-fA-F]+)\}\[\d+\] lid [\d-]+(?: \"([^\"]*)\")?", text)
    return tuple(printable(name or guid) for guid, name in rows)


def parse_record(text: str) -> tuple[int | None, float | None]:
    """(MTU in bytes, bytes per second) of a PathRecord dump: `mtu...0x85`, two bits how to compare, six the code."""
    codes = {k: integer(v) for k, v in re.findall(r"^[ \t]*(mtu|rate)\.{1,40}(\w{1,20})[ \t]*\n", text, re.MULTILINE)}
    mtu, rate = ((codes.get(name) or 0) & 0x3F for name in ("mtu", "rate"))
    return _MTUS.get(mtu), _RATES[rate] * 1e9 / 8 if rate in _RATES else None


def _problem(text: str) -> str:
    if _LOST in text:
        return "no route"
    if "not installed" in text:
        return "ibtracert and saquery are not installed"
    if _PERMISSION.search(text):
        return "ibtracert and saquery need permission for /dev/infiniband/umad*"
    return printable(text.strip(), limit=160) or "no answer"


def paths(checked: CheckedCluster) -> Iterator[Verdict]:
    """Between neighbouring hosts of each subnet: that there is a route, and that it carries what both ends could."""
    if not checked.paths:
        yield unknown("it was not tried") if ways_to_trace(checked) else ok("no InfiniBand subnet of several hosts")
    pairs: dict[str, list[FabricPath]] = defaultdict(list)
    for way in checked.paths:
        pairs[f"{way.source} - {way.target}"].append(way)
    yield from (_judged(ways, about) for about, ways in pairs.items())


def _judged(ways: Sequence[FabricPath], about: str) -> Verdict:
    """One sentence a pair of hosts: the worst of its ways."""
    lost = [w.way for w in ways if w.problem == "no route"]
    silent = [w for w in ways if w.problem and w.problem != "no route"]
    narrow = [f"{w.way}: {text}" for w in ways if (text := _less(w))]
    if lost:
        return fail(f"no route from {listed(lost)}", about=about)
    if narrow:
        return warn(f"the way carries less than both its ends: {listed(narrow)}", about=about)
    return unknown(silent[0].problem, about=about) if silent else ok(_as_words(ways), about=about)


def _less(way: FabricPath) -> str:
    """What a way carries less than the lesser of its two ends."""
    if way.rate_bytes_per_s and way.end_rate and way.rate_bytes_per_s < 0.99 * way.end_rate:
        return f"{show_rate(way.rate_bytes_per_s)} of {show_rate(way.end_rate)}"
    return f"MTU {way.mtu} of {way.end_mtu}" if way.mtu and way.end_mtu and way.mtu < way.end_mtu else ""


def _as_words(ways: Sequence[FabricPath]) -> str:
    counts = sorted({len(w.switches) for w in ways if w.switches is not None})
    hops = f"over {' or '.join(map(str, counts))} switch{'es' * (counts != [1])}" if counts else "known to the manager"
    rates = [w.rate_bytes_per_s for w in ways if w.rate_bytes_per_s]
    return f"{count_of(len(ways), 'way')} {hops}" + (f", at least {show_rate(min(rates))}" if rates else "")


CHECKS = (
    Check(
        "rdma.paths",
        "ibtracert and saquery --src-to-dst, to the next host of each subnet",
        "infiniband-diags",
        "sudo ibtracert FROM TO; sudo iblinkinfo | grep -v '4X'  # the link that is slow, or the manager's routing",
        level="pairs",
        survey=paths,
        root="the routes, where /dev/infiniband/umad* is root's",
    ),
)
