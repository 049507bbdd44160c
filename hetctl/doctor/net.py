"""Interfaces, MTUs, speeds, subnets and ports of the network that ranks talk over."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hetctl.comm.contract.facts import NicFacts
from hetctl.comm.contract.units import listed, show_rate
from hetctl.doctor.check import Check, CheckedCluster, HostCase, switched_off
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, usual, warn, worst

_PLUMBING = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali")
_ROCE_MTU = 4200
_EPHEMERAL = 16_000
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def ifname(case: HostCase) -> Verdict:
    """The interface of the data address, and whether variables point elsewhere."""
    nic = data_nic(case)
    environment = case.facts.system.environment
    verdicts = [_variable(case, name, environment[name], nic) for name in _VARIABLES if name in environment]
    if not case.checked.several:
        return worst(verdicts, otherwise="one host: loopback will do")
    address = case.host.data_address if case.host else None
    if address is None:
        if any("addresses" in path for path in case.facts.unknown):
            verdicts.append(unknown(case.facts.why_unknown("nics[*].addresses") or "its addresses are unknown"))
        else:
            verdicts.append(fail("no interface has an address that ranks could use", "ip -br addr  # on {host}"))
    elif nic is None:
        verdicts.append(fail(f"the data address {address} is on none of its interfaces"))
    return worst(verdicts, otherwise=f"{address} on {nic.netdev if nic else '?'}")


def _variable(case: HostCase, name: str, value: str, nic: NicFacts | None) -> Verdict:
    names = [n.netdev for n in case.facts.nics if n.netdev] + ["lo"]
    better = nic.netdev if nic else "the data interface"
    right = f"export {name}={'=' if name.startswith('NCCL') else ''}{better}  # or unset it: hetctl sets it per host"
    if name.startswith("GLOO") and value.startswith("^"):
        return fail(f"{name}={value}: gloo knows no '^' and crashes on it", right)
    chosen = matching(value, names)
    if not chosen:
        return fail(f"{name}={value} names no interface of this host", right)
    if all(n.startswith(_PLUMBING) for n in chosen) and case.checked.several:
        return fail(f"{name}={value} means {listed(chosen)}, which leads nowhere", right)
    if nic is not None and nic.netdev not in chosen and case.checked.several:
        return warn(f"{name}={value} is not the interface of the data address ({better})", right)
    return ok(f"{name}={value}")


def matching(value: str, names: Sequence[str]) -> list[str]:
    """The interfaces a value like `ens`, `=ens1`, `^lo,docker` means: prefixes unless `=`, excluded after `^`."""
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    words = [w.strip().partition(":")[0] for w in value.split(",") if w.strip()]
    hits = [n for n in names if any(n == w if exact else n.startswith(w) for w in words)]
    return [n for n in names if n not in hits] if exclude else hits


def data_nic(case: HostCase) -> NicFacts | None:
    """The port that carries the host's data address."""
    address = case.host.data_address if case.host else None
    return next((n for n in case.facts.nics if address and any(a.ip == address for a in n.addresses)), None)


def mtu(checked: CheckedCluster) -> Iterator[Verdict]:
    """Per network: every port the same MTU; the odd ones are named, of two the smaller."""
    for network in (n for n in checked.cluster.networks if n.kind in ("roce", "ethernet")):
        sizes: dict[tuple[str, str], int] = {}
        silent: list[str] = []
        for host in network.hosts:
            for nic in _ports_in(checked, host, network.name):
                if nic.mtu is None:
                    silent.append(f"{host} {nic.name}")
                else:
                    sizes[host, nic.netdev or nic.name] = nic.mtu
        if silent:
            yield unknown(f"{network.name}: no MTU known of {listed(silent)}", about=silent[0].split()[0])
        yield from _judge_mtu(network.name, network.kind, sizes)


def _judge_mtu(network: str, kind: str, sizes: dict[tuple[str, str], int]) -> Iterator[Verdict]:
    if not sizes:
        return
    most = usual(sizes.values())
    odd = {at: size for at, size in sizes.items() if size != most}
    for (host, nic), size in odd.items():
        line = f"sudo ip link set dev {nic} mtu {most}  # on {host}, and on its switch port"
        yield fail(f"{nic} has MTU {size}, the others of {network} {most}", line, about=host)
    for host in dict.fromkeys(h for h, _ in sizes if not any(h == odd_host for odd_host, _ in odd)):
        if kind == "roce" and most < _ROCE_MTU:
            names = listed([nic for h, nic in sizes if h == host])
            line = f"sudo ip link set dev {names.split(',')[0]} mtu 9000  # both ends and the switch"
            yield warn(f"{names}: MTU {most} holds no RDMA packet of 4096 bytes", line, about=host)
        else:
            yield ok(f"{most} all over {network}", about=host)


def _ports_in(checked: CheckedCluster, host: str, network: str) -> list[NicFacts]:
    known = checked.cluster.host_by_name.get(host)
    names = {n.name for n in known.nics if n.network == network} if known else set()
    facts = checked.facts.get(host)
    return [n for n in (facts.nics if facts else ()) if (n.netdev or n.name) in names]


def speed(case: HostCase) -> Verdict:
    """No carrier under an address is broken; slower than the same kind elsewhere is worth a look."""
    best: dict[str, float] = defaultdict(float)
    for _, nic in case.checked.ports:
        if _is_wire(nic) and nic.rate_bytes_per_s and nic.pci_id:
            best[nic.pci_id] = max(best[nic.pci_id], nic.rate_bytes_per_s)
    verdicts = []
    for nic in filter(_is_wire, case.facts.nics):
        rate, most = nic.rate_bytes_per_s, best[nic.pci_id or ""]
        if nic.carrier is False and nic.addresses and not nic.rdma_device:  # rdma.port_state says so of those
            verdicts.append(fail(f"{nic.name} has an address but no carrier", nic=nic.name))
        elif rate and rate < most:
            says = f"{nic.name} runs at {show_rate(rate)}, others of its kind at {show_rate(most)}"
            verdicts.append(warn(says, nic=nic.name))
        elif rate is None and nic.carrier and nic.pci:
            verdicts.append(unknown(f"the driver of {nic.name} tells no speed"))
    return worst(verdicts, otherwise="as fast as their kind" if best else "nothing to compare")


def flaps(case: HostCase) -> Verdict:
    days = max((case.facts.system.uptime_s or 0.0) / 86400, 1.0)
    wires = list(filter(_is_wire, case.facts.nics))
    if all(n.carrier_changes is None for n in wires):
        return unknown("the kernel does not count") if wires else ok("no wire to watch")
    bad = [n for n in wires if (n.carrier_changes or 0) > max(10, 2 * days)]
    says = [warn(f"{n.name} lost and found its carrier {n.carrier_changes} times", nic=n.name) for n in bad]
    return worst(says, otherwise="steady")


def _is_wire(nic: NicFacts) -> bool:
    """An Ethernet port with hardware below it, in use: not off, no member of a bond, no plumbing."""
    hardware = nic.link_layer == "ethernet" and nic.pci and not nic.virtual and not switched_off(nic)
    return bool(hardware and nic.netdev and not nic.netdev.startswith(_PLUMBING))


def subnet(case: HostCase) -> Verdict:
    """Two interfaces in one IP network: TCP leaves by one of them, whatever address it was bound to."""
    found: dict[str, list[NicFacts]] = defaultdict(list)
    for nic in case.facts.nics:
        if nic.carries_ip and nic.netdev and not nic.bond and not nic.netdev.startswith(_PLUMBING):
            for address in nic.addresses:
                if address.prefix is not None and address.scope in (None, "global") and ":" not in address.ip:
                    found[str(ipaddress.ip_network(f"{address.ip}/{address.prefix}", strict=False))].append(nic)
    shared = {net: nics for net, nics in found.items() if len({n.netdev for n in nics}) > 1}
    if not case.checked.several or not shared:
        return ok("each interface in a network of its own" if not shared else "one host: nothing leaves it")
    rules = case.facts.system.policy_rules
    net, nics = next(iter(shared.items()))
    names = listed(sorted({str(n.netdev) for n in nics}))
    if rules:
        return ok(f"{names} share {net}, with {rules} routing rules of their own")
    says = f"{names} are both in {net}: the kernel sends through one of them only"
    second = sorted({str(n.netdev) for n in nics})[1]
    own = next(a.ip for n in nics if n.netdev == second for a in n.addresses if ":" not in a.ip)
    line = (
        f"sudo ip route add {net} dev {second} src {own} table 101 && sudo ip rule add from {own} table 101"
        "  # on {host}; or give each rail its own subnet"
    )
    if all(any(g.routable for g in n.gids) for n in nics):
        return warn(f"{says} (RDMA picks its port by GID, TCP does not)", line)
    return fail(says, line) if rules == 0 else warn(f"{says}; its routing rules are unknown", line)


def ports(case: HostCase) -> Verdict:
    text = case.facts.system.settings.get("ip_local_port_range")
    match = re.fullmatch(r"(\d+)\s+(\d+)", text or "")
    if match is None:
        return unknown("the range of local ports is not readable")
    count = int(match[2]) - int(match[1]) + 1
    if count < _EPHEMERAL:
        return warn(f"only {count} local ports ({match[1]} to {match[2]})")
    return ok(f"{count} local ports")


CHECKS = (
    Check(
        "net.ifname",
        "addresses, and NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        "Primus network_standard.py",
        "ip -br addr  # on {host}; then name data_address in the inventory",
        rule=ifname,
        essential=True,
    ),
    Check("net.mtu", "/sys/class/net/*/mtu of every port of a network", "gcm eth_learn_mtu_bad", survey=mtu),
    Check("net.subnet", "addresses, `ip -j rule`", "the kernel picks the interface by route", rule=subnet),
    Check(
        "net.speed",
        "/sys/class/net/*/{speed,carrier}",
        "gcm eth_learn_degraded",
        "ethtool {nic}  # on {host}: then cable, transceiver, switch port",
        rule=speed,
    ),
    Check(
        "net.flaps",
        "/sys/class/net/*/carrier_changes",
        "gcm eth_learn_degraded",
        "journalctl -k -g {nic}  # on {host}: then cable, transceiver, switch port",
        rule=flaps,
    ),
    Check(
        "net.ports",
        "/proc/sys/net/ipv4/ip_local_port_range",
        "Primus, 'Address already in use'",
        "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'  # on {host}",
        rule=ports,
    ),
)
