"""Which network each NIC reaches: InfiniBand subnets, RoCE and Ethernet networks, told apart by what ports show."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetctl.comm.contract.cluster import Network, Nic
from hetctl.comm.contract.fabrics import NETWORKS, NetworkKind, kind_of_port
from hetctl.comm.contract.facts import HostFacts, NicFacts

Subnets = Mapping[str, Sequence[str]]  # a name a person gave -> the CIDR blocks its fabric routes between
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_PLUMBING = re.compile(
    r"lo$|docker|veth|br-|virbr|cni|flannel|cali|cilium|tun|tap|podman|kube|lxc|lxd|dummy|nodelocaldns|wg|ovs|sit|ip6tnl"
)
_BMC_DRIVERS = ("cdc_ether", "rndis_host", "cdc_eem", "cdc_ncm")
_DEFAULT_PREFIX = "fe80:0000:0000:0000"


@dataclass(frozen=True)
class NetworkPort:
    """A NIC that can carry training traffic, the key of the network it reaches, and its IP network."""

    host: str
    facts: NicFacts
    kind: NetworkKind
    key: str | None  # equal keys of one kind are one network
    why: str  # how the key was told
    address: str | None = None
    subnet: str | None = None  # the IP network of `address`, or the name a person gave it

    def nic(self, network: str | None) -> Nic:
        """The port as the cluster holds it."""
        facts = self.facts
        return Nic(
            name=facts.netdev or facts.name,
            kind=self.kind,
            rate_bytes_per_s=facts.rate_bytes_per_s,
            network=network,
            address=self.address,
            rdma_device=facts.rdma_device if NETWORKS[self.kind].verbs else None,
            pci=facts.pci,
            numa_node=facts.numa_node,
        )


@dataclass(frozen=True)
class Ignored:
    """A NIC that is left out, and why; `plain` when that is no news (loopback, containers' plumbing)."""

    host: str
    nic: str
    reason: str
    plain: bool = False


def ports_of(
    host: str, facts: HostFacts, *, exclude: Sequence[str] = (), named: Subnets | None = None
) -> tuple[list[NetworkPort], list[Ignored]]:
    """The NICs of a host that can carry data, and those left out with the reason."""
    ports: list[NetworkPort] = []
    ignored: list[Ignored] = []
    spare: list[NicFacts] = []
    for nic in facts.nics:
        reason, plain = _left_out(nic, exclude)
        if reason:
            ignored.append(Ignored(host, nic.name, reason, plain))
        elif nic.virtual and not nic.bond_members:
            spare.append(nic)
        else:
            ports.append(_port(host, nic, named or {}))
    if not any(p.address or p.key for p in ports):  # a container or a namespace: its only way out is virtual
        ports += [_port(host, nic, named or {}) for nic in spare]
    else:
        ignored += [Ignored(host, nic.name, "no hardware below it", plain=True) for nic in spare]
    ports = _joined_by_ip(ports)
    dead = [p for p in ports if p.key is None and p.address is None]
    ignored += [Ignored(host, p.facts.name, p.why) for p in dead]
    return [p for p in ports if p not in dead], ignored


def name_networks(ports: Sequence[NetworkPort]) -> tuple[tuple[Network, ...], dict[tuple[str, str], str]]:
    """The networks, and (host, NIC) -> network name. Numbered by kind in the order of their keys."""
    members: dict[tuple[NetworkKind, str], list[NetworkPort]] = defaultdict(list)
    for port in ports:
        if port.key is not None:
            members[port.kind, port.key].append(port)
    networks: list[Network] = []
    names: dict[tuple[str, str], str] = {}
    counts: dict[NetworkKind, int] = defaultdict(int)
    for (kind, _), group in sorted(members.items(), key=lambda item: item[0]):
        name = f"{NETWORKS[kind].short}{counts[kind]}"
        counts[kind] += 1
        hosts = tuple(dict.fromkeys(p.host for p in group))
        networks.append(Network(name, kind, hosts, group[0].why))
        names |= {(p.host, p.facts.name): name for p in group}
    return tuple(networks), names


def twins_apart(ports: Sequence[NetworkPort]) -> tuple[list[NetworkPort], list[str]]:
    """Ports of InfiniBand subnets that only look like one (two ports with one LID) lose their key, said in words."""
    seen: dict[tuple[str, int], NetworkPort] = {}
    twins: dict[str, str] = {}
    for port in ports:
        lid = port.facts.lid
        if port.kind != "infiniband" or not port.key or not lid or port.facts.virtual_function:
            continue
        other = seen.setdefault((port.key, lid), port)
        if other.host != port.host:
            twins[port.key] = (
                f"{other.host} {other.facts.name} and {port.host} {port.facts.name} both have LID {lid}: "
                f"two InfiniBand subnets that look like one; give each a subnet_prefix of its own"
            )
    apart = [
        replace(p, key=None, why=twins[p.key]) if p.kind == "infiniband" and p.key and p.key in twins else p
        for p in ports
    ]
    return apart, list(twins.values())


def _left_out(nic: NicFacts, exclude: Sequence[str]) -> tuple[str, bool]:
    """Why a NIC carries no data ('' when it may), and whether that is no news."""
    if {nic.name, nic.netdev, nic.rdma_device} & set(exclude):
        return "excluded by the inventory", True
    if _PLUMBING.match(nic.netdev or nic.name) and not nic.rdma_device:
        return "plumbing of this host, not a way out of it", True
    if nic.bond and not nic.infiniband:  # a bond over InfiniBand is one of its interfaces: RDMA takes the ports
        return f"a member of {nic.bond}", True
    if (nic.driver or "") in _BMC_DRIVERS:
        return "the way to this host's management controller", True
    if nic.admin_up is False and not nic.infiniband:
        return "switched off", True
    if nic.state in ("down", "init", "armed") or (nic.carrier is False and not nic.infiniband):
        physical = f", {nic.physical_state}" if nic.physical_state else ""
        return f"not up (state {nic.state or 'no carrier'}{physical})", False
    return "", False


def _port(host: str, nic: NicFacts, named: Subnets) -> NetworkPort:
    address, subnet = _ip_network(nic, named) if nic.carries_ip else (None, None)
    if (kind := kind_of_port(nic.driver, nic.pci_id)) is not None:
        word = NETWORKS[kind].word
        why = f"{word}, IP network {subnet}" if subnet else f"{word}, whose members no IP network of this host tells"
        return NetworkPort(host, nic, kind, subnet, why, address, subnet)
    if nic.infiniband:
        key, why = _infiniband(nic)
        return NetworkPort(host, nic, "infiniband", key, why, address, subnet)
    if nic.rdma_device and subnet and any(g.routable for g in nic.gids):
        return NetworkPort(host, nic, "roce", subnet, f"RoCE v2, IP network {subnet}", address, subnet)
    if subnet is None:
        return NetworkPort(host, nic, "ethernet", None, "no address that a network can be told by", address)
    return NetworkPort(host, nic, "ethernet", subnet, f"IP network {subnet}", address, subnet)


def _joined_by_ip(ports: Sequence[NetworkPort]) -> list[NetworkPort]:
    """The ports; those without IP of a network that only native libraries reach are known by their host's IP network.

    EFA has no address of its own: what is in one subnet of the cloud reaches each other, and more is not visible.
    """
    known = [p for p in ports if p.subnet is not None]
    return [_at(p, known) if NETWORKS[p.kind].plugin and p.key is None and known else p for p in ports]


def _at(port: NetworkPort, known: Sequence[NetworkPort]) -> NetworkPort:
    """The port in the IP network of its like, else of its host's first port that has one."""
    told = next((p for p in known if p.kind == port.kind), known[0])
    where = f"IP network {told.subnet} of {told.facts.name}"
    return replace(port, key=told.subnet, why=f"{NETWORKS[port.kind].word}, {where}")


def _infiniband(nic: NicFacts) -> tuple[str | None, str]:
    """A subnet is its prefix; where everyone keeps the default prefix, the LID of the subnet manager tells more."""
    prefix = nic.subnet_prefix
    if nic.sm_lid == 0:
        return None, "no subnet manager answers (sm_lid 0)"
    if prefix is None:
        return None, "its subnet prefix is unknown"
    if prefix != _DEFAULT_PREFIX:
        return prefix, f"InfiniBand subnet {prefix}"
    if nic.sm_lid is None:
        return None, "it has the default subnet prefix and the subnet manager's LID is unknown"
    return f"{prefix}/{nic.sm_lid:06}", f"default subnet prefix, subnet manager at LID {nic.sm_lid}"


def _ip_network(nic: NicFacts, named: Subnets) -> tuple[str | None, str | None]:
    """The address traffic would use (IPv4 first, never link-local) and the IP network it is in."""
    usable: list[tuple[IPAddress, int | None]] = []
    for address in nic.addresses:
        try:
            ip = ipaddress.ip_address(address.ip)
        except ValueError:
            continue
        if not (ip.is_link_local or ip.is_loopback or ip.is_unspecified or ip.is_multicast):
            usable.append((ip, address.prefix))
    for ip, prefix in sorted(usable, key=lambda pair: pair[0].version):
        for name, blocks in named.items():
            if any(_within(ip, block) for block in blocks):
                return str(ip), name
        if prefix is not None:
            return str(ip), str(ipaddress.ip_network(f"{ip}/{prefix}", strict=False))
    return (str(usable[0][0]), None) if usable else (None, None)


def _within(ip: IPAddress, block: str) -> bool:
    network = ipaddress.ip_network(block)
    return ip.version == network.version and ip in network
