"""Host to host and island to island: who reaches whom, which ways there are, why one is missing."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.units import listed, show_rate
from hetctl.discovery.inventory import InventoryHost
from hetctl.discovery.links import rails_alike
from hetctl.doctor import paths, reach
from hetctl.doctor.check import Check, CheckedCluster, FabricPath, ReachAttempt
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import Dialogue, converse
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.shell import Shell
from hetctl.probe.raw import printable

PORTS = (29_500, 29_999)  # what a run's store and bridges may use
_BAD_SHARE = 0.5  # of what rails of the same NICs reach
NEED_TRAFFIC = {"ssh.peer", "net.firewall", "net.path_mtu", "host.sharedfs", "rdma.paths"}


class RemoteProgram:
    """Our program on one host, and what it said of the port it listens on."""

    def __init__(self, shell: Shell, dialogue: Dialogue, said: Mapping[str, Any]) -> None:
        self.shell, self.dialogue = shell, dialogue
        self.port = int(said["port"]) if isinstance(said.get("port"), int) else None
        self.problem = printable(str(said.get("problem", "")))

    def ask(self, document: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        self.dialogue.send(document, deadline=deadline)
        return self.dialogue.receive(deadline=deadline)

    def close(self) -> None:
        self.dialogue.close()
        self.shell.close()


def tried(
    entries: Sequence[InventoryHost], checked: CheckedCluster, *, timeout_s: float, folders: Sequence[str]
) -> CheckedCluster:
    """The cluster with every directed pair of hosts tried at its data address, and folders looked at from all hosts."""
    hosts = {e.name: checked.cluster.host_by_name[e.name] for e in entries}
    addressed = [e for e in entries if hosts[e.name].data_address]
    secret = secrets.token_hex(32)
    with Entrance() as entrance:

        def begin(entry: InventoryHost, deadline: Deadline) -> RemoteProgram:
            shell = entrance.open(entry, deadline)
            request = {"secret": secret, "deadline_s": 4 * timeout_s, "ports": list(PORTS)}
            request["address"] = hosts[entry.name].data_address
            dialogue = converse(shell, entry.access.python, inspect.getsource(reach), request, deadline=deadline)
            return RemoteProgram(shell, dialogue, dialogue.receive(deadline=deadline))

        begun = fan_out(addressed, begin, deadline_s=timeout_s)
        programs = {o.item.name: o.value for o in begun if o.value is not None}
        try:
            found = _calls(programs, checked, timeout_s)
            shared = {folder: _shared(folder, programs, timeout_s) for folder in folders}
            ways = _traces(programs, checked, timeout_s)
        finally:
            for program in programs.values():
                program.close()
    listening = {name: program.problem for name, program in programs.items() if program.port is None}
    return replace(checked, tried=tuple(found), paths=tuple(ways), listening=listening, shared=shared)


def _calls(programs: Mapping[str, RemoteProgram], checked: CheckedCluster, timeout_s: float) -> list[ReachAttempt]:
    """Each host calls all others at once; a whole packet is sent to its next neighbour only."""
    names = [name for name, program in programs.items() if program.port is not None]
    hosts = checked.cluster.host_by_name

    def work(name: str, deadline: Deadline) -> list[ReachAttempt]:
        others = [other for other in names if other != name]
        following = names[(names.index(name) + 1) % len(names)] if name in names else ""
        mtus = {following: _mtu(checked, name)}
        targets = [
            {"address": hosts[other].data_address, "port": programs[other].port, "mtu": mtus.get(other)}
            for other in others
        ]
        results = programs[name].ask({"call": targets}, deadline).get("results", []) if targets else []
        return [_tried(name, *pair) for pair in zip(others, targets, results, strict=True)]

    return [tried for o in fan_out(list(programs), work, deadline_s=timeout_s) for tried in o.value or []]


def _tried(source: str, target: str, asked: Mapping[str, Any], said: Mapping[str, Any]) -> ReachAttempt:
    largest = said.get("largest_packet")
    return ReachAttempt(
        source,
        target,
        str(asked["address"]),
        asked["port"],
        printable(str(said.get("problem", ""))),
        said.get("alive") is True,
        largest if isinstance(largest, bool) else None,
    )


def _traces(programs: Mapping[str, RemoteProgram], checked: CheckedCluster, timeout_s: float) -> list[FabricPath]:
    """Each host's ways through its InfiniBand subnets to the next one."""
    wanted = {name: ways for name, ways in paths.ways_to_trace(checked).items() if name in programs}

    def work(name: str, deadline: Deadline) -> list[FabricPath]:
        asked = [paths.question(here, there) for _, here, there in wanted[name]]
        said = programs[name].ask({"trace": asked}, deadline).get("results", [])
        return [paths.traced(name, t, (a, b), one) for (t, a, b), one in zip(wanted[name], said, strict=True)]

    return [way for o in fan_out(list(wanted), work, deadline_s=timeout_s) for way in o.value or []]


def _mtu(checked: CheckedCluster, host: str) -> int | None:
    """The MTU of the interface that carries a host's data address."""
    address, facts = checked.cluster.host_by_name[host].data_address, checked.facts[host]
    return next((n.mtu for n in facts.nics if any(a.ip == address for a in n.addresses)), None)


def _shared(folder: str, programs: Mapping[str, RemoteProgram], timeout_s: float) -> dict[str, str]:
    """A token written on the first host; what each of the others sees of it. The token is taken away again."""
    token = secrets.token_hex(32)
    names = list(programs)
    if not names:
        return {}
    seen: dict[str, str] = {}
    for number, name in enumerate(names):
        work = {"look" if number else "write": folder, "token": token}
        try:
            seen[name] = str(programs[name].ask(work, Deadline(timeout_s)).get("problem", ""))
        except HetctlError as error:
            seen[name] = printable(error.message)
    with_token = {"forget": folder, "token": token}
    try:
        programs[names[0]].ask(with_token, Deadline(timeout_s))
    except HetctlError as error:
        seen[names[0]] = seen[names[0]] or printable(error.message)
    return seen


# --- rules ---------------------------------------------------------------------------------------------------------


def peer(checked: CheckedCluster) -> Iterator[Verdict]:
    """Whether anything of a host answers at its data address; a single closed port is the firewall's affair."""
    if not checked.tried:
        yield _not_tried(checked)
        return
    lost = {(r.source, r.target) for r in checked.tried if r.problem and not r.alive}
    sources, targets = (dict.fromkeys(getattr(r, end) for r in checked.tried) for end in ("source", "target"))
    mute = {s for s in sources if len(checked.tried) > 2 and all((s, t) in lost for t in targets if t != s)}
    for source in mute:
        why = next(r.problem for r in checked.tried if r.source == source)
        yield fail(f"it reaches none of the other data addresses: {why}", about=source)
    for target in targets:
        rows = [r for r in checked.tried if r.target == target and r.source not in mute]
        missing = [r for r in rows if (r.source, target) in lost]
        if missing:
            says = f"{rows[0].address} is not reached by {listed([r.source for r in missing])}: {missing[0].problem}"
            yield (fail if len(missing) == len(rows) else warn)(says, about=target)
        elif rows:
            yield ok(f"reached by all {len(rows)} others", about=target)


def firewall(checked: CheckedCluster) -> Iterator[Verdict]:
    """Whether the ports of runs can be listened on and called: a host that answers, but not there, has a firewall."""
    if checked.tried is None:
        yield _not_tried(checked)
        return
    for host, problem in checked.listening.items():
        yield fail(f"cannot listen on a port of {PORTS[0]}-{PORTS[1]}: {problem}", about=host)
    for target in dict.fromkeys(r.target for r in checked.tried):
        closed = [r for r in checked.tried if r.target == target and r.problem and r.alive]
        if closed:
            says = f"port {closed[0].port} is closed to {listed([r.source for r in closed])}: {closed[0].problem}"
            yield fail(says, about=target)
        else:
            yield ok("open", about=target)


def _not_tried(checked: CheckedCluster) -> Verdict:
    return unknown("it was not tried") if checked.several else ok("one host")


def path_mtu(checked: CheckedCluster) -> Iterator[Verdict]:
    """A packet as large as the interface allows, to the next host, unfragmented."""
    rows = [r for r in checked.tried or () if not r.problem]
    known = [r for r in rows if r.largest_packet is not None]
    for row in known:
        if row.largest_packet is False:
            says = f"packets of {_mtu(checked, row.source)} bytes from {row.source} to {row.target} are lost on the way"
            yield fail(says, about=f"{row.source} - {row.target}", address=row.address)
        else:
            yield ok("whole packets pass", about=f"{row.source} - {row.target}")
    if not known and checked.several:
        yield unknown("no ping on these hosts, or nobody answers it")
    elif not checked.several:
        yield ok("one host")


def ways(checked: CheckedCluster) -> Iterator[Verdict]:
    """For each pair of islands the ways that would work, and of each other the first thing it lacks."""
    if not checked.cluster.links:
        yield ok("one island: nothing to bridge")
    for link in checked.cluster.links:
        usable = [w for w in link.transports if w.usable]
        lacking = "; ".join(f"{w.kind}: {w.reason}" for w in link.transports if not w.usable)
        rates = ", ".join(f"{w.kind}{_rate(w.rate_bytes_per_s, w.measured)}" for w in usable)
        about = " - ".join(link.islands)
        if usable:
            yield ok(f"{rates} works" + (f"; not {lacking}" if lacking else ""), about=about)
        else:
            yield fail(f"no way at all: {lacking}", about=about)


def _rate(rate: float | None, measured: bool) -> str:
    return "" if rate is None else f" at {show_rate(rate)}{' measured' * measured}"


def pair(checked: CheckedCluster) -> Iterator[Verdict]:
    """Measured rails against what rails of the same NICs reach; a host that all slow ones have in common is named."""
    rows = [m for m in checked.cluster.measured if m.nics != ("*", "*")]
    if not rows:
        yield unknown("nothing was measured") if checked.several else ok("one host")
    for usual, group, slow in rails_alike(rows):
        nics, tool = group[0].nics, group[0].tool
        common = set.intersection(*(set(m.hosts) for m in slow)) if len(slow) > 1 else set()
        for row in group:
            about, over = " - ".join(row.hosts), f"{'-'.join(nics)} by {tool}"
            if row.problem or row.rate_bytes_per_s is None:
                yield unknown(f"{over}: {row.problem or 'not measured'}", about=about)
            elif row not in slow:
                yield ok(f"{over}: {show_rate(row.rate_bytes_per_s)}", about=about)
            else:
                says = f"{over} between {about}: {show_rate(row.rate_bytes_per_s)}, its like {show_rate(usual)}"
                whose = next(iter(common)) if len(common) == 1 else about
                judge = warn if row.rate_bytes_per_s >= _BAD_SHARE * usual else fail
                yield judge(says, about=whose, nic=nics[0])


_FIREWALL = (
    f"sudo ufw allow {PORTS[0]}:{PORTS[1]}/tcp || sudo firewall-cmd --add-port={PORTS[0]}-{PORTS[1]}/tcp  # on {{host}}"
)
CHECKS = (
    Check(
        "ssh.peer",
        "a connection from every host to every other's data address",
        "sky#6004",
        f"{_FIREWALL}; or another data_address in the inventory",
        level="pairs",
        survey=peer,
        essential=True,
    ),
    Check(
        "net.firewall",
        f"bind and connect on ports {PORTS[0]}-{PORTS[1]}",
        "sglang#3226",
        _FIREWALL,
        level="pairs",
        survey=firewall,
    ),
    Check(
        "net.path_mtu",
        "ping -M do with a packet of the whole MTU, to the next host",
        "gcm eth_learn_mtu_bad",
        "tracepath {address}  # then the MTU of the switch ports between",
        level="pairs",
        survey=path_mtu,
    ),
    Check("island.ways", "networks, ports, libraries, limits of both islands", "hetctl", level="pairs", survey=ways),
    Check(
        "perf.pair",
        "measured rate of each rail (perftest where there is one, else our sender)",
        "nccl-tests PERFORMANCE.md; CVS ibperf",
        "ethtool {nic}; tc qdisc show dev {nic}  # on both; then cable and switch port",
        level="pairs",
        survey=pair,
    ),
)
