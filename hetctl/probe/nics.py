"""Network ports of a host: interfaces and RDMA ports of sysfs joined into one record each, plus addresses and MTUs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from hetctl.comm.contract.facts import Address, Gid, GidType, LinkLayer, NicFacts
from hetctl.probe.notes import Notes
from hetctl.probe.port_fabric import RDMA, Devinfo, mtu_in, with_fabric
from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI, pci_of
from hetctl.probe.vendors.base import sysfs_pcie
from hetctl.probe.words import (
    count,
    flag,
    integer,
    items,
    json_documents,
    key_values,
    mapping,
    node,
    pci_id,
    told,
    whole_lines,
)

NET, CXI = "/sys/class/net/", "/sys/class/cxi/"
_ETHERNET, _INFINIBAND, _UP = 1, 32, 0x1  # ARPHRD_ETHER, ARPHRD_INFINIBAND, IFF_UP
_GIGABIT_BYTES = 1e9 / 8


def nics(raw: Raw, notes: Notes) -> tuple[NicFacts, ...]:
    """Every port: RDMA ports first (each with its interface where it has one), then the remaining interfaces."""
    addresses = _addresses(raw, notes)
    devinfo = parse_ibv_ports(raw.tool("ibv_devinfo").stdout)
    interfaces = {n: _interface(raw, n, addresses.get(n)) for n in raw.children(NET) if raw.files.get(NET + n + "/mtu")}
    interfaces = {name: _over_hardware(facts, interfaces) for name, facts in interfaces.items()}
    found, taken = [], set()
    for device in raw.children(RDMA):
        for port in sorted(filter(str.isdecimal, raw.children(f"{RDMA}{device}/ports/")), key=int):
            port_facts = _rdma_port(raw, device, int(port[:9]), devinfo)
            netdev = _netdev_of(raw, port_facts, interfaces)
            free = netdev if netdev not in taken else None
            taken.add(netdev)
            found.append(with_fabric(raw, _joined(port_facts, interfaces.get(free or "")), devinfo))
    found += [facts for name, facts in interfaces.items() if name not in taken]
    shown = {nic.pci for nic in found if nic.pci} | {nic.name for nic in found}
    found += [nic for nic in (_cxi_device(raw, name) for name in raw.children(CXI)) if not shown & {nic.pci, nic.name}]
    return tuple(_noted(nic, notes.at(f"nics[{i}]")) for i, nic in enumerate(found))


# --- interfaces ----------------------------------------------------------------------------------------------------


def _interface(raw: Raw, name: str, addresses: tuple[Address, ...] | None) -> NicFacts:
    base = NET + name
    pci = pci_of(raw.links.get(base + "/device", ""))
    flags, kind = integer(raw.text(base + "/flags")), integer(raw.text(base + "/type"))
    layers: dict[int | None, LinkLayer] = {_ETHERNET: "ethernet", _INFINIBAND: "infiniband"}
    speed = integer(raw.text(base + "/speed"))  # Mbit/s; -1 and 4294967295 mean unknown
    master = raw.links.get(base + "/master", "").rpartition("/")[2]
    way = raw.links.get(base)
    return NicFacts(
        name=name,
        netdev=name,
        link_layer=layers.get(kind),
        state=told(raw.text(base + "/operstate")),
        rate_bytes_per_s=speed * 1e6 / 8 if speed and 0 < speed < 10**8 else None,
        mtu=count(raw.text(base + "/mtu")) or None,
        mac=_not_zero(raw.text(base + "/address")),
        addresses=addresses or (),
        carrier=flag(raw.text(base + "/carrier")),
        carrier_changes=count(raw.text(base + "/carrier_changes")),
        admin_up=None if flags is None else bool(flags & _UP),
        bond=master or None,
        bond_members=tuple((raw.text(base + "/bonding/slaves") or "").split()),
        over=tuple(sorted(p[len(base) + 7 :] for p in raw.links if p.startswith(base + "/lower_"))),
        virtual=None if way is None else "/devices/virtual/" in way,
        virtual_function=base + "/device/physfn" in raw.links if pci else None,
        **_hardware(raw, base, pci),
    )


def _hardware(raw: Raw, base: str, pci: str | None) -> dict[str, Any]:
    """PCI address, ids, NUMA node, PCIe link and driver of the function behind an interface or RDMA device."""
    of = PCI + (pci or "none")
    driver = raw.links.get(base + "/device/driver") or raw.links.get(of + "/driver") or ""
    return {
        "pci": pci,
        "pci_id": pci_id(raw.text(of + "/vendor"), raw.text(of + "/device")),
        "numa_node": node(raw.text(of + "/numa_node")),
        "pcie": sysfs_pcie(raw, pci),
        "driver": driver.rpartition("/")[2] or None,
    }


def _over_hardware(nic: NicFacts, interfaces: Mapping[str, NicFacts], depth: int = 4) -> NicFacts:
    """A bond, VLAN or bridge with the place of its first real port: as near to a GPU as that is, nothing virtual."""
    if nic.pci or depth == 0:
        return nic
    below = (interfaces[name] for name in (*nic.bond_members, *nic.over) if name in interfaces)
    real = next((port for lower in below if (port := _over_hardware(lower, interfaces, depth - 1)).pci), None)
    if real is None:
        return nic
    return replace(nic, virtual=False, pci=real.pci, pci_id=real.pci_id, numa_node=real.numa_node, pcie=real.pcie)


def _not_zero(text: str | None) -> str | None:
    """An address, GUID or version, unless it is all zeros: that is how drivers say that there is none."""
    return text if text and text.strip("0:.") else None


# --- addresses -----------------------------------------------------------------------------------------------------


def _addresses(raw: Raw, notes: Notes) -> dict[str, tuple[Address, ...]]:
    """Interface -> its addresses, of `ip -j`, else of `ip -o`, else what the kernel told directly."""
    for tool, parse in (("ip", parse_ip_json), ("ip text", parse_ip_text)):
        found = parse(raw.tool(tool).stdout)
        if found:
            notes.source("nics[*].addresses", f"`{' '.join(raw.tool(tool).argv) or tool}`")
            return found
    reason = f"`ip` gave no addresses ({raw.tool('ip').problem or 'no output understood'})"
    told_by_kernel = parse_kernel_addresses(raw.values.get("ipv4"), raw.files.get("/proc/net/if_inet6", ""))
    if told_by_kernel:
        notes.warn(f"{reason}: one IPv4 address an interface is known, from the kernel")
        notes.source("nics[*].addresses", "SIOCGIFADDR, /proc/net/if_inet6")
    elif raw.children(NET):
        notes.why("nics[*].addresses", reason)
    return told_by_kernel


def parse_kernel_addresses(ipv4: object, if_inet6: str) -> dict[str, tuple[Address, ...]]:
    """Interface -> `10.0.0.5/24` of the ioctl, then what /proc/net/if_inet6 says."""
    found: dict[str, tuple[Address, ...]] = {}
    for name, text in mapping(ipv4).items():
        ip, _, prefix = text.partition("/") if isinstance(text, str) else ("", "", "")
        address = _address(ip, count(prefix), "host" if ip.startswith("127.") else "global")
        if address:
            found[str(name)] = (address,)
    for name, addresses in parse_if_inet6(if_inet6).items():
        found[name] = (*found.get(name, ()), *addresses)
    return found


def parse_ip_json(text: str) -> dict[str, tuple[Address, ...]]:
    """`ip -j addr`: a list of interfaces (empty objects among them in old versions)."""
    found: dict[str, tuple[Address, ...]] = {}
    for document in json_documents(text):
        for entry in map(mapping, items(document)):
            name = told(entry.get("ifname"))
            listed = [mapping(a) for a in items(entry.get("addr_info"))]
            if name:
                every = (_address(a.get("local"), count(a.get("prefixlen")), told(a.get("scope"))) for a in listed)
                found[name] = tuple(a for a in every if a)
    return found


def parse_ip_text(text: str) -> dict[str, tuple[Address, ...]]:
    """`ip -o addr`: one address a line, `2: eth0    inet 10.0.0.1/24 brd ... scope global eth0`."""
    found: dict[str, tuple[Address, ...]] = {}
    pattern = r"^\d+:\s+(\S+)\s+inet6?\s+([0-9a-fA-F.:]+)/(\d{1,3})(?:.*?scope (\w+))?"
    for name, ip, prefix, scope in re.findall(pattern, text, re.MULTILINE):
        address = _address(ip, count(prefix), scope or None)
        if address:
            found[name] = (*found.get(name, ()), address)
    return found


def parse_if_inet6(text: str) -> dict[str, tuple[Address, ...]]:
    """/proc/net/if_inet6: address, index, prefix length, scope, flags (hexadecimal), interface."""
    scopes = {"00": "global", "20": "link", "10": "host"}
    found: dict[str, tuple[Address, ...]] = {}
    for words in map(str.split, text.splitlines()):
        if len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]):
            ip = ":".join(words[0][i : i + 4] for i in range(0, 32, 4))
            address = _address(ip, integer("0x" + words[2]), scopes.get(words[3]))
            if address:
                found[words[5]] = (*found.get(words[5], ()), address)
    return found


def _address(ip: object, prefix: int | None, scope: str | None) -> Address | None:
    try:
        plain = ipaddress.ip_address(ip) if isinstance(ip, str) else None
    except ValueError:
        return None
    return Address(str(plain), prefix, scope) if plain else None


# --- RDMA ports ----------------------------------------------------------------------------------------------------


def _rdma_port(raw: Raw, device: str, port: int, devinfo: Devinfo) -> NicFacts:
    base, of = f"{RDMA}{device}/ports/{port}", RDMA + device
    layers: dict[str, LinkLayer] = {"infiniband": "infiniband", "ethernet": "ethernet"}
    layer = layers.get((raw.text(base + "/link_layer") or "").lower())
    state, rate_text = _word(raw.text(base + "/state")), told(raw.text(base + "/rate"))
    gids = _gids(raw, base, layer)
    pci = pci_of(raw.links.get(of + "/device", ""))
    return NicFacts(
        name=f"{device}/{port}",
        rdma_device=device,
        rdma_port=port,
        link_layer=layer,
        state=state,
        physical_state=_word(raw.text(base + "/phys_state")),
        rate_bytes_per_s=parse_rate(rate_text) if state == "active" else None,
        rate_text=rate_text,
        rdma_mtu=mtu_in(devinfo.get((device, port), {}), "active_mtu"),  # sysfs does not show it
        gids=gids,
        sm_lid=integer(raw.text(base + "/sm_lid")) if layer == "infiniband" else None,
        lid=integer(raw.text(base + "/lid")) if layer == "infiniband" else None,
        subnet_prefix=gids[0].gid[:19] if layer == "infiniband" and gids and gids[0].index == 0 else None,
        guid=_not_zero(told(raw.text(of + "/node_guid"))),
        firmware=_not_zero(told(raw.text(of + "/fw_ver"))),
        virtual_function=of + "/device/physfn" in raw.links if pci else None,
        rdma_software=pci is None and of + "/device" not in raw.links,
        counters=_counters(raw, base),
        growing=_growing(raw, base),
        **_hardware(raw, of, pci),
    )


def _cxi_device(raw: Raw, device: str) -> NicFacts:
    """A Slingshot device by itself, as a container shows it that has not the host's interfaces."""
    base = CXI + device
    pci = pci_of(raw.links.get(base + "/device", ""))
    speed, link = (integer(raw.text(f"{base}/device/properties/{file}")) for file in ("speed", "link"))
    return NicFacts(
        name=device,
        state=None if link is None else "up" if link else "down",
        rate_bytes_per_s=speed * 1e6 / 8 if speed and 0 < speed < 10**8 else None,
        **_hardware(raw, base, pci),
    )


def _word(text: str | None) -> str | None:
    """`active` of "4: ACTIVE", `link_up` of "5: LinkUp"."""
    match = re.fullmatch(r"\d+:\s*(\w+)", text or "")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match.group(1)).lower() if match else None


def parse_rate(text: str | None) -> float | None:
    """Bytes per second of "400 Gb/sec (4X NDR)"."""
    match = re.match(r"(\d{1,5}(?:\.\d{1,3})?)\s*Gb/sec", text or "")
    return float(match.group(1)) * _GIGABIT_BYTES or None if match else None


def _gids(raw: Raw, base: str, layer: LinkLayer | None) -> tuple[Gid, ...]:
    found = []
    for path, content in raw.files.items():
        folder, _, index = path.rpartition("/")
        gid = content.strip().lower()
        if folder != base + "/gids" or not re.fullmatch(r"\d{1,5}", index) or not _GID.fullmatch(gid):
            continue
        if gid.strip("0:") and gid != _PREFIX_ALONE:
            kind = raw.text(f"{base}/gid_attrs/types/{index}")
            netdev = told(raw.text(f"{base}/gid_attrs/ndevs/{index}"))
            found.append(Gid(int(index), gid, gid_type(kind, layer), netdev))
    return tuple(sorted(found, key=lambda gid: gid.index))


_GID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}")
_PREFIX_ALONE = "fe80" + ":0000" * 7  # stands in a slot that has no address yet


def gid_type(text: str | None, layer: LinkLayer | None) -> GidType | None:
    """The kernel writes "IB/RoCE v1" for both; the link layer tells which it is."""
    if text == "RoCE v2":
        return "roce_v2"
    if text == "IB/RoCE v1" or (text is None and layer == "infiniband"):
        return {"infiniband": "ib", "ethernet": "roce_v1"}.get(layer or "")  # type: ignore[return-value]
    return None


def _counters(raw: Raw, base: str) -> dict[str, int]:
    found = {}
    for path, content in raw.files.items():
        if path.startswith((base + "/counters/", base + "/hw_counters/")):
            value = count(content.strip())
            if value is not None:
                found[path.rpartition("/")[2]] = value
    return found


def _growing(raw: Raw, base: str) -> dict[str, int]:
    """Counters that grew between two readings, by how much."""
    found = {}
    for path, pair in mapping(raw.values.get("counters")).items():
        before, after = (count(text) for text in [*items(pair), None, None][:2])
        if path.startswith(base + "/") and before is not None and after is not None and after > before:
            found[path.rpartition("/")[2]] = after - before
    return found


def parse_ibv_ports(text: str) -> dict[tuple[str, int], dict[str, str]]:
    """(device, port) -> what `ibv_devinfo` says of the port and its device, its own words."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    device, port, shared = "", 0, dict[str, str]()
    for line in whole_lines(text):
        values = key_values(line)
        if "hca_id" in values:
            device, port, shared = values["hca_id"], 0, {}
        port = count(values.get("port")) or port if "port" in values else port
        if device and port:
            found.setdefault((device, port), dict(shared)).update(values)
        else:
            shared.update(values)
    return found


# --- joining -------------------------------------------------------------------------------------------------------


def _netdev_of(raw: Raw, port: NicFacts, interfaces: Mapping[str, NicFacts]) -> str | None:
    """The interface of an RDMA port: as its GID table says, else the one interface of the same function.

    A bonded device's table names the bond; a VLAN's GIDs stand in its parent's table, so own interfaces come first.
    """
    named = list(dict.fromkeys(g.netdev for g in port.gids if g.netdev in interfaces))
    own = [n for n in raw.children(f"{RDMA}{port.rdma_device}/device/net/") if n in interfaces]
    own = own or [n for n, facts in interfaces.items() if facts.pci and facts.pci == port.pci]
    bonds = [interfaces[n].bond for n in own]
    for candidates in (_both(named, own), _both(named, bonds), named, _of_port(raw, own, port), own):
        if candidates:
            return min(candidates, key=lambda n: (len(n), n)) if candidates is own else candidates[0]
    return None


def _both(a: Iterable[str | None], b: Iterable[str | None]) -> list[str]:
    known = set(b)
    return [name for name in a if name and name in known]


def _of_port(raw: Raw, names: list[str], port: NicFacts) -> list[str]:
    """Of several interfaces on one function, those that dev_port assigns to this port (counted from 0)."""
    return [n for n in names if count(raw.text(f"{NET}{n}/dev_port")) == (port.rdma_port or 0) - 1]


def _joined(port: NicFacts, interface: NicFacts | None) -> NicFacts:
    """One record of an RDMA port and its interface; what both tell is the port's, and how it is only the port's."""
    if interface is None:
        return port
    lacking = {f.name: getattr(interface, f.name) for f in fields(NicFacts) if getattr(port, f.name) in (None, ())}
    of_port = {"state": port.state, "virtual_function": port.virtual_function}
    rate = interface.rate_bytes_per_s if port.rdma_software else port.rate_bytes_per_s
    return replace(port, **{**lacking, **of_port, "name": interface.name, "rate_bytes_per_s": rate})


def _noted(nic: NicFacts, notes: Notes) -> NicFacts:
    """Everything here but the addresses and the active MTU is sysfs; say so, and why what is missing is."""
    for name in ("state", "mtu", "carrier", "numa_node", "pci"):
        if not (nic.virtual and name in ("numa_node", "pci", "carrier")) and (name != "mtu" or nic.netdev):
            notes.pick(name, (getattr(nic, name), "sysfs"))
    down = f"the port is {nic.state or 'in no known state'}"
    if not nic.virtual:
        why = down if nic.state not in ("active", "up") else "the driver reports no speed"
        notes.pick("rate_bytes_per_s", (nic.rate_bytes_per_s, "sysfs"), why=why)
    if nic.rdma_device:
        notes.pick("rdma_mtu", (nic.rdma_mtu, "ibv_devinfo"))
    return nic
