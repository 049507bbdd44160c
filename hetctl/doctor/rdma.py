"""RDMA ports: state, rate, GIDs, makers, bonds, libraries, and the way to device memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from itertools import combinations

from hetctl.comm.contract.fabrics import NETWORKS, kind_of_port, plugin_missing
from hetctl.comm.contract.facts import HostFacts, NicFacts
from hetctl.comm.contract.units import count_of, listed, show_rate
from hetctl.doctor.check import Check, CheckedCluster, HostCase, switched_off
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn, worst

_NONE = "no RDMA port here"
_SLOW_WIDTHS = ("1X", "SDR", "DDR", "QDR")


def port_state(case: HostCase) -> Verdict:
    infiniband = [port for port in case.rdma_ports if port.infiniband]
    without_ip = bool(infiniband) and not any(port.carries_ip for port in infiniband)
    well = _all_of(case, "up") + "; no IP runs over them, RDMA needs none" * without_ip
    return worst([ok(well), *(_state(case, port) for port in case.rdma_ports)], otherwise=well)


def _state(case: HostCase, port: NicFacts) -> Verdict:
    if port.state is None:
        return unknown(f"the state of {port.name} is not readable")
    if port.state == "active" or (port.state == "init" and port.link_layer == "infiniband"):
        return ok("up")  # INIT on InfiniBand is the subnet manager's affair
    without_partner = port.physical_state == "polling" or (port.physical_state == "disabled" and port.admin_up)
    why = "no partner at the other end of the cable" if without_partner else port.physical_state
    says = f"{port.name} is {port.state}" + (f": {why}" if why else "")
    if port.link_layer == "ethernet" and port.netdev and not port.addresses:
        return warn(f"{says}, and without an address: not in use?", device=port.rdma_device)
    same = [n for host, n in case.checked.ports if host != case.name and n.rdma_device == port.rdma_device]
    if same and all(n.state != "active" for n in same):
        return warn(f"{says}, on every host: not in use?", device=port.rdma_device)
    return fail(says, device=port.rdma_device)


def rate(case: HostCase) -> Verdict:
    """Against the fastest active port of the same model anywhere."""
    best: dict[str | None, float] = defaultdict(float)
    for _, port in case.checked.ports:
        if port.rdma_device and port.rate_bytes_per_s and port.pci_id:
            best[port.pci_id] = max(best[port.pci_id], port.rate_bytes_per_s)
    verdicts = []
    for port in (p for p in case.rdma_ports if p.state == "active" and not p.rdma_software):
        found, most = port.rate_bytes_per_s, best[port.pci_id]
        if found is None:
            verdicts.append(unknown(f"{port.name} tells no rate"))
        elif any(word in (port.rate_text or "") for word in _SLOW_WIDTHS) and found < most:
            verdicts.append(fail(f"{port.name} fell back to {port.rate_text}", device=port.rdma_device))
        elif found < most:
            says = f"{port.name} runs at {port.rate_text}, others of its model at {show_rate(most)}"
            verdicts.append(warn(says, device=port.rdma_device))
    return worst(verdicts, otherwise=_all_of(case, "at the rate of their model"))


def gid(case: HostCase) -> Verdict:
    """Routable RoCE v2 GIDs. Link-local ones reach each other on one wire, never a port with a routable one."""
    ports = _roce(case.facts)
    others = [h for h, f in case.checked.facts.items() if f is not case.facts and any(map(_has_routable, _roce(f)))]
    verdicts = []
    for port in ports:
        if _has_routable(port):
            continue
        typed = [g for g in port.gids if g.type is not None]
        if port.gids and not typed:
            verdicts.append(unknown(f"the kernel does not tell the types of the GIDs of {port.name}"))
        elif not any(g.type == "roce_v2" for g in port.gids):
            verdicts.append(fail(f"{port.name} has no RoCE v2 GID", nic=port.netdev))
        elif others:
            says = f"{port.name} has link-local GIDs only, which do not reach the routable ones of {listed(others)}"
            verdicts.append(fail(says, nic=port.netdev))
        else:
            verdicts.append(warn(f"{port.name} has link-local GIDs only: no router forwards them", nic=port.netdev))
    return worst(verdicts, otherwise="routable" if ports else "no RoCE port in use")


def _roce(facts: HostFacts) -> list[NicFacts]:
    return [n for n in facts.nics if n.rdma_device and n.link_layer == "ethernet" and n.state == "active"]


def _has_routable(port: NicFacts) -> bool:
    return any(g.routable for g in port.gids)


def gid_env(checked: CheckedCluster) -> Iterator[Verdict]:
    """A GID index set by hand means different entries on different hosts."""
    kinds: dict[str, set[str]] = {}
    for host, facts in checked.facts.items():
        text = facts.system.environment.get("NCCL_IB_GID_INDEX")
        roce = _roce(facts)
        if text is None or not roce:
            yield ok("unset" if text is None else "no RoCE port in use", about=host)
            continue
        entries = [next((g for g in n.gids if str(g.index) == text.strip()), None) for n in roce]
        if not all(entries):
            names = listed([n.name for n, g in zip(roce, entries, strict=True) if g is None])
            yield fail(f"NCCL_IB_GID_INDEX={text} is empty on {names}", _UNSET, about=host)
            continue
        kinds[host] = {f"{g.type}{'' if g.routable else ', not routable'}" for g in entries if g}
    for host, found in kinds.items():
        same = all(other == found for other in kinds.values()) and found == {"roce_v2"}
        says = f"NCCL_IB_GID_INDEX means {listed(sorted(found))} here"
        yield ok(says, about=host) if same else warn(says, _UNSET, about=host)


def linklayer_mix(checked: CheckedCluster) -> Iterator[Verdict]:
    """InfiniBand against RoCE: across vendors the bridge takes TCP and says so; inside one it splits the island."""
    layers = {
        h: {kind_of_port(n.driver, n.pci_id) or n.link_layer for n in f.nics if n.rdma_device and not switched_off(n)}
        for h, f in checked.facts.items()
    }
    for host, facts in checked.facts.items():
        wants = [k for k in ("NCCL_NET", "RCCL_NET") if facts.system.environment.get(k, "").upper() == "IB"]
        if wants and not layers[host]:
            yield fail(f"{wants[0]}=IB, but it has no RDMA port", f"unset {wants[0]}  # on {host}", about=host)
    mixed = False
    for vendor, group in checked.groups.items():
        for a, b in combinations(group, 2):
            if vendor and layers[a] and layers[b] and not layers[a] & layers[b]:
                mixed = True
                words = f"{_words(layers[a])} against {_words(layers[b])}: no native communicator spans them over RDMA"
                line = "hetctl plan --explain  # shows what talks over what"
                yield warn(words, line, about=f"{a} - {b}")
    if not mixed:
        yield ok("each vendor's hosts share a link layer")


def hca_vendor_mix(checked: CheckedCluster) -> Iterator[Verdict]:
    for vendor, group in checked.groups.items():
        makers: dict[str, set[str]] = defaultdict(set)
        for host, facts in group.items():
            for nic in facts.nics:
                if nic.rdma_device and nic.state == "active" and nic.pci_id:
                    makers[nic.pci_id.partition(":")[0]].add(host)
        if len(makers) > 1:
            each = "; ".join(f"{maker}: {listed(sorted(hosts))}" for maker, hosts in makers.items())
            line = "NCCL_IB_QPS_PER_CONNECTION=1 NCCL_IB_TIMEOUT=22  # and watch for stalls"
            yield warn(f"RDMA NICs of several makers in one native group ({each})", line, about=vendor)
        else:
            yield ok("one maker" if makers else _NONE, about=vendor)


def plugin(case: HostCase) -> Verdict:
    """EFA and Slingshot: native libraries reach them through libfabric, or take sockets without a word."""
    found = {kind for n in case.facts.nics if (kind := kind_of_port(n.driver, n.pci_id)) and not switched_off(n)}
    vendors = dict.fromkeys(g.vendor for g in case.gpus)
    verdicts = []
    for kind in sorted(found) if vendors else ():
        row = NETWORKS[kind]
        missing = [m for v in vendors if (m := plugin_missing(case.facts, v, case.report.access.env))]
        providers = case.facts.rdma.fabric_providers
        if missing:
            judge = fail if case.checked.several else warn  # one host does without it
            verdicts.append(judge(f"{row.word}: {missing[0]}; without it the island takes TCP", row.install))
        elif providers is not None and kind not in providers:
            verdicts.append(warn(f"{row.word}: the libfabric that fi_info shows has no provider '{kind}'", row.install))
        else:
            verdicts.append(ok(f"{row.word}: its plugin is there"))
    otherwise = "no GPU here" if found and not vendors else "no network that needs a plugin"
    return worst(verdicts, otherwise=otherwise)


def bonds(case: HostCase, *, broken: bool) -> Verdict:
    """Bonds that are `broken` altogether, or those that lack some of their members."""
    by_name = {n.netdev: n for n in case.facts.nics if n.netdev}
    found = [n for n in case.facts.nics if n.bond_members and n.admin_up is not False]
    verdicts = []
    for one in found:
        members = [by_name.get(m) for m in one.bond_members]
        down = [m for m in members if m is not None and m.carrier is False]
        silent = [m for m in members if m is None or m.carrier is None]
        if len(down) == len(members) and broken:
            verdicts.append(fail(f"all members of {one.name} are down", nic=one.name))
        elif down and len(down) < len(members) and not broken:
            verdicts.append(warn(f"{listed([d.name for d in down])} of {one.name} is down", nic=one.name))
        elif silent:
            verdicts.append(unknown(f"the members of {one.name} do not tell their carrier"))
    return worst(verdicts, otherwise="up" if found else "no bond")


def peer_mem(case: HostCase) -> Verdict:
    if not case.gpus or not case.rdma_ports:
        return ok("no GPU here" if not case.gpus else _NONE)
    modules, dma_buf = case.facts.rdma.peer_memory_modules, case.facts.rdma.dma_buf
    if modules or dma_buf:
        return ok(listed(list(modules)) if modules else "dma-buf (only registering memory proves it)")
    if modules is None and dma_buf is None:
        return unknown("neither modules nor the kernel's configuration are readable")
    if dma_buf is None:
        return warn("no peer memory module; whether the kernel has dma-buf for it is not known")
    why = case.facts.why_unknown("rdma.dma_buf") or "the kernel has none"
    return fail(f"neither a peer memory module nor dma-buf: {why}")


def libraries(case: HostCase) -> Verdict:
    if not case.rdma_ports:
        return ok(_NONE)
    found = case.facts.rdma.libraries
    if found is None:
        return unknown(case.facts.why_unknown("rdma.libraries") or "ldconfig gave no answer")
    names = " ".join(library.name for library in found)
    missing = [name for name in ("libibverbs", "librdmacm") if name not in names]
    if missing:
        return fail(f"not installed: {listed(missing)}")
    by_port = {p.name: _providers(p) for p in case.rdma_ports}
    unclear = [name for name, wanted in by_port.items() if not wanted]
    known = case.facts.rdma.providers or ()
    has = {w for wanted in by_port.values() for w in wanted if f"lib{w}" in names or w in known}
    absent = sorted({wanted[0] for wanted in by_port.values() if wanted and not has & set(wanted)})
    if unclear or (absent and case.facts.rdma.providers is None):
        return unknown(f"whether libibverbs has a provider for {listed(unclear or absent)} is not visible")
    return warn(f"libibverbs has no provider for {listed(absent)}") if absent else ok("with providers")


_PROVIDERS = ("mlx5", "mlx4", "bnxt_re", "ionic", "irdma", "efa", "rxe", "siw", "hns")
_OF_DRIVERS = {"bnxt_en": "bnxt_re", "ice": "irdma", "i40e": "irdma", "hns3": "hns"}


def _providers(port: NicFacts) -> tuple[str, ...]:
    """What libibverbs opens a port with, by device name (bnxt_re0, rxe_eth0) or driver, which renamed ones keep."""
    driver = port.driver or ""
    for name in (port.rdma_device or "", _OF_DRIVERS.get(driver, driver)):
        found = tuple(p for p in _PROVIDERS if name.startswith(p))
        if found:
            return found
    return ("rxe", "siw") if port.rdma_software else ()


def _all_of(case: HostCase, words: str) -> str:
    count = len(case.rdma_ports)
    return f"{count_of(count, 'port')} {words}" if count else _NONE


def _words(layers: Collection[str | None]) -> str:
    names = {**{kind: row.word for kind, row in NETWORKS.items()}, "ethernet": NETWORKS["roce"].word}
    return " and ".join(sorted(names.get(layer, "an unknown layer") for layer in layers))  # type: ignore[call-overload]


_BONDING = "cat /proc/net/bonding/{nic}  # on {host}"
_UNSET = "unset NCCL_IB_GID_INDEX  # on {host}: NCCL has chosen it itself since 2.21"
_CABLE = "ibstat {device} || rdma link show  # on {host}; Polling is the cable, Disabled an administrator"
_PACKAGES = "sudo apt-get install -y ibverbs-providers librdmacm1 rdma-core  # on {host}; RHEL: dnf install rdma-core"
CHECKS = (
    Check(
        "rdma.port_state",
        "/sys/class/infiniband/*/ports/*/{state,phys_state}",
        "gcm learn_good; Primus",
        _CABLE,
        rule=port_state,
        essential=True,
    ),
    Check("rdma.rate", "ports/*/rate", "gcm learn_ib_intf_bad_rate", _CABLE, rule=rate),
    Check(
        "rdma.gid",
        "ports/*/gids, gid_attrs",
        "nccl#769, #426, #1131; uccl PR#803",
        "sudo ip addr add ADDRESS/24 dev {nic}  # on {host}; and leave NCCL_IB_GID_INDEX unset",
        rule=gid,
    ),
    Check("rdma.gid_env", "NCCL_IB_GID_INDEX against the table of each host", "nccl#890", survey=gid_env),
    Check("rdma.linklayer_mix", "link_layer of every pair, NCCL_NET", "hetctl's design", survey=linklayer_mix),
    Check("rdma.hca_vendor_mix", "PCI ids of active RDMA ports", "nccl#1526", survey=hca_vendor_mix),
    Check("rdma.plugin", "drivers of NICs, ldconfig -p, fi_info -l", "NeMo-RL PR#2359; aws-ofi-nccl", rule=plugin),
    Check("rdma.bond", "bonding members' carrier", "lshca#30", _BONDING, rule=partial(bonds, broken=True)),
    Check("rdma.slaves", "bonding members' carrier", "gcm", _BONDING, rule=partial(bonds, broken=False)),
    Check(
        "rdma.peer_mem",
        "/proc/modules, the kernel's configuration",
        "imbue GdrEnabled; nccl#1939: only registering proves it",
        "sudo modprobe nvidia_peermem  # on {host}; AMD: a kernel with CONFIG_PCI_P2PDMA and HSA_AMD_P2P",
        rule=peer_mem,
    ),
    Check("rdma.libs", "ldconfig -p, /etc/libibverbs.d", "ml-engineering; uccl#301", _PACKAGES, rule=libraries),
)
