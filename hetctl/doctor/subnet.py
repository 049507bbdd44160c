"""InfiniBand subnets as a whole: managers, LIDs, partitions, MTUs, and what ibdiagnet last found.

A subnet is its prefix; below the default prefix, its prefix and its manager's LID, as in discovery.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from hetctl.comm.contract.fabric_facts import SubnetManager
from hetctl.comm.contract.facts import NicFacts
from hetctl.comm.contract.units import listed
from hetctl.doctor.check import Check, CheckedCluster, HostCase, Ports, over_networks, switched_off
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, usual, warn

_NONE = "no InfiniBand port in use"
_DEFAULT_PREFIX = "fe80:0000:0000:0000"
_PACKETS = (4096, 2048, 1024, 512, 256)
_ROCE_HEADERS = 94  # Ethernet's MTU leaves so much for IP, UDP and the transport's headers, rounded up
Said = Iterator[tuple[str, Verdict]]


def subnets(checked: CheckedCluster, *states: str) -> dict[str, Ports]:
    """Subnet -> its ports in these states, of all hosts."""
    found: dict[str, list[tuple[str, NicFacts]]] = defaultdict(list)
    for host, port in checked.ports:
        if port.infiniband and not switched_off(port) and port.state in states:
            prefix = port.subnet_prefix or "?"
            found[prefix if prefix != _DEFAULT_PREFIX else f"{prefix}/{port.sm_lid}"].append((host, port))
    return dict(found)


# --- managers ------------------------------------------------------------------------------------------------------


def manager(checked: CheckedCluster) -> Iterator[Verdict]:
    """That there is one, which, and who would take over. It is enough that one host of a subnet may ask."""
    of_each = subnets(checked, "active", "init", "armed")
    strays = dict(_strays(checked))
    for verdict in over_networks(checked, of_each, _managers, otherwise=_NONE):
        stray = strays.get(verdict.about)
        yield stray if stray and verdict.state in ("ok", "unknown") else verdict


def _managers(ports: Ports) -> Said:
    known = {(m.guid, m.lid): m for _, p in ports for m in p.fabric.managers or ()}
    masters = [m for m in known.values() if m.state == "master"]
    split = _split(ports, masters) if len(masters) > 1 else None
    lids = [p.sm_lid for _, p in ports if p.sm_lid]
    for host, port in ports:
        if port.state == "init" or port.sm_lid == 0:
            says = f"{port.name} ({port.rdma_device}) waits for a subnet manager (sm_lid {port.sm_lid})"
            yield host, fail(says)
        elif port.sm_lid is None:
            yield host, unknown(f"{port.name} does not tell its subnet manager's LID")
        elif split:
            yield host, split
        elif port.sm_lid != usual(lids):
            says = f"{port.name} has its subnet manager at LID {port.sm_lid}, the others of its subnet at {usual(lids)}"
            yield host, fail(says, _ONE_MANAGER)
        else:
            yield host, _who(port, list(known.values()))


def _who(port: NicFacts, known: list[SubnetManager]) -> Verdict:
    one = next((m for m in known if m.lid == port.sm_lid), None)
    if one is None:
        lids = listed([str(m.lid) for m in known])
        elsewhere = f"those that answer are at LID {lids}" if known else "nobody was asked"
        why = port.fabric.unasked.get("managers", elsewhere)
        asking = "sudo sminfo -C {device} -P {port}; sudo saquery -C {device} -P {port} SMIR  # on {host}"
        says = f"one answers at LID {port.sm_lid}; its priority and who would take over are not known: {why}"
        return unknown(says, asking, device=port.rdma_device, port=port.rdma_port)
    if one.state not in ("master", None):
        return warn(f"the manager at LID {one.lid} is {one.state}, not master", _ONE_MANAGER)
    others = [f"LID {m.lid} with {m.priority}" for m in known if m is not one and m.state == "standby"]
    return ok(f"LID {one.lid}, priority {one.priority}; " + (f"standby: {listed(others)}" if others else "no standby"))


def _split(ports: Ports, masters: list[SubnetManager]) -> Verdict:
    """Several masters: rails that are subnets of their own look so too, as long as each device sees one of them."""
    seen: dict[str, set[str | None]] = defaultdict(set)
    for _, port in ports:
        seen[port.rdma_device or ""] |= {m.guid for m in port.fabric.managers or () if m.state == "master"}
    each = listed([f"{m.guid} at LID {m.lid} with priority {m.priority}" for m in masters])
    if ports[0][1].subnet_prefix == _DEFAULT_PREFIX and all(len(guids) < 2 for guids in seen.values()):
        says = f"subnets that look like one, each with a master of its own: {each}"
        return warn(says, "set subnet_prefix in each subnet's opensm.conf  # one of its own for each")
    return fail(f"one subnet has {len(masters)} masters, which do not see each other: {each}", _ONE_MANAGER)


def _strays(checked: CheckedCluster) -> Said:
    """Below the default prefix: one device of a vendor's hosts has its manager elsewhere than theirs."""
    for group in checked.groups.values():
        lids: dict[str, dict[str, int]] = defaultdict(dict)
        for host, port in ((host, port) for host, facts in group.items() for port in facts.nics):
            if port.subnet_prefix == _DEFAULT_PREFIX and port.state == "active" and port.sm_lid:
                lids[port.rdma_device or ""][host] = port.sm_lid
        for device, each in lids.items():
            most = -usual(-lid for lid in each.values())  # of equally many the smallest: managers start first
            for host, lid in each.items():
                if lid != most:
                    says = f"{device} has its subnet manager at LID {lid}, on the other hosts at LID {most}"
                    yield host, warn(f"{says}: another subnet, or one that is split", _TRACE, about=host)


# --- LIDs and partitions -------------------------------------------------------------------------------------------


def _in_subnets(judge: Callable[[Ports], Said]) -> Callable[[CheckedCluster], Iterator[Verdict]]:
    """A rule on the ports of each subnet that are active."""
    return lambda checked: over_networks(checked, subnets(checked, "active"), judge, otherwise=_NONE)


def lids(ports: Ports) -> Said:
    real = [p for _, p in ports if not p.virtual_function and p.lid]
    shared = {number for number, times in Counter(p.lid for p in real).items() if times > 1}
    lmcs = [p.fabric.lmc for _, p in ports if p.fabric.lmc is not None]
    for host, port in ports:
        if port.lid == 0:
            yield host, fail(f"{port.name} is active without a LID")
        elif port.lid is None:
            yield host, unknown(f"{port.name} does not tell its LID")
        elif port.lid in shared:
            others = listed([f"{h} {p.name}" for h, p in ports if p.lid == port.lid and p is not port])
            yield host, warn(f"{port.name} and {others} have LID {port.lid}: two subnets that look like one")
        elif port.fabric.lmc is not None and port.fabric.lmc != usual(lmcs):
            yield host, warn(f"{port.name} has LMC {port.fabric.lmc}, the others of its subnet {usual(lmcs)}")
        else:
            yield host, ok(f"of their own, LMC {usual(lmcs) if lmcs else 'unknown'}")


def partitions(ports: Ports) -> Said:
    """Two ports talk in a partition that both are in, one of them at least as a full member; NCCL takes entry 0."""
    told = [(host, p) for host, p in ports if p.fabric.pkeys is not None]
    full = [tuple(sorted(p.fabric.full_partitions)) for _, p in told]
    most = usual([keys for keys in full if keys] or [()])
    first = [p.fabric.pkeys[0] for _, p in told if p.fabric.pkeys]
    limited = [host for host, p in told if not p.fabric.full_partitions & set(most)]
    for host, port in ports:
        keys = port.fabric.pkeys
        if keys is None:
            yield host, unknown(f"the partition keys of {port.name} are not readable")
        elif not port.fabric.full_partitions & set(most) and len(told) > 1:
            own = listed([f"{key:#06x}" for key in keys if key])
            says = f"{port.name} is no full member of a partition of the others ({_keys(most)}; its own: {own})"
            only_limited = {key & 0x7FFF for key in keys} & set(most) and len(set(limited)) == 1
            yield host, warn(f"{says}: it reaches full members only") if only_limited else fail(says)
        elif keys[0] != usual(first):
            says = f"entry 0 of {port.name} is {keys[0]:#06x}, of the others {usual(first):#06x}: NCCL uses entry 0"
            yield host, warn(says, _index(keys, usual(first)))
        else:
            yield host, ok(f"full members of {_keys(most)}" if most else "no port is a full member")


def _index(keys: tuple[int, ...], wanted: int) -> str:
    place = keys.index(wanted) if wanted in keys else "INDEX"
    return f"export NCCL_IB_PKEY={place}  # on {{host}}; or the same order in partitions.conf of the manager"


def _keys(partitions: Iterable[int]) -> str:
    return listed([f"{key | 0x8000:#06x}" for key in partitions]) or "none"


# --- MTU -----------------------------------------------------------------------------------------------------------


def mtu(checked: CheckedCluster) -> Iterator[Verdict]:
    """Active against enabled, and against the others; of RoCE against what the interface's MTU leaves room for."""
    networks: dict[str, Ports] = {**subnets(checked, "active"), "RoCE": checked.roce_ports}
    return over_networks(checked, networks, _mtus, otherwise="no RDMA port in use")


def _mtus(ports: Ports) -> Said:
    sizes = [p.rdma_mtu for _, p in ports if p.rdma_mtu]
    for host, port in ports:
        found, most = port.rdma_mtu, port.fabric.enabled_mtu or _PACKETS[0]
        if found is None:
            yield host, unknown(f"the active MTU of {port.name} is not known: no answer of ibv_devinfo")
        elif port.link_layer == "ethernet":
            room = next((size for size in _PACKETS if size <= (port.mtu or 0) - _ROCE_HEADERS), found)
            fits = found >= min(room, most)
            says = (
                f"{port.name} sends RDMA packets of {found} bytes, its interface's MTU {port.mtu} has room for {room}"
            )
            yield host, ok("as large as the interfaces allow") if fits else warn(says, _RELOAD, nic=port.netdev)
        elif found < usual(sizes):
            yield host, warn(f"{port.name} has an active MTU of {found}, the others of its subnet {usual(sizes)}")
        elif found < most:
            yield host, warn(f"{port.name} has an active MTU of {found}, where {most} is enabled")
        else:
            yield host, ok(f"{found} active as enabled")


def report(case: HostCase) -> Verdict:
    """The errors in the last report of ibdiagnet, where somebody ran it on this host."""
    found = case.facts.rdma.report
    if found is None:
        return ok("no report of ibdiagnet here")
    bad = [f"{stage} {errors}" for stage, (_, errors) in found.stages.items() if errors]
    when = f" of {found.written}" if found.written else ""
    if bad:
        return warn(f"its report{when} has errors: {listed(bad)}", path=found.path)
    return ok(f"no error in that{when}")


_ONE_MANAGER = (
    "sudo saquery SMIR; sudo sminfo  # on a host of each side; then stop one manager, or mend the link between"
)
_TRACE = "sudo ibnetdiscover | less  # on {host}: where its cable leads"
_RELOAD = (
    "sudo ip link set dev {nic} mtu 4200 && ibv_devinfo | grep mtu  # on {host}: RDMA follows when the port comes up"
)
CHECKS = (
    Check(
        "rdma.sm",
        "ports/*/{sm_lid,state}; sminfo, saquery SMIR",
        "AMD multi-node guide; infiniband-diags",
        "sudo systemctl start opensm  # on one host of the subnet, or in the switch",
        survey=manager,
        root="the manager's priority, and who would take over",
    ),
    Check(
        "rdma.lid",
        "ports/*/{lid,lid_mask_count}",
        "InfiniBand specification: LIDs and LMC",
        "sudo ibstat; sudo saquery SMIR  # on {host}: the manager gives LIDs; lmc in its opensm.conf",
        survey=_in_subnets(lids),
    ),
    Check(
        "rdma.pkey",
        "ports/*/pkeys",
        "InfiniBand specification: partitions; NCCL_IB_PKEY",
        "sudo saquery PKTR  # on the manager's host; then full members in partitions.conf, and restart opensm",
        survey=_in_subnets(partitions),
    ),
    Check(
        "rdma.mtu",
        "ibv_devinfo: active_mtu, max_mtu",
        "gcm eth_learn_mtu_bad; OpenSM partitions.conf",
        "sudo saquery MCMR  # on the manager's host; then mtu=5 in partitions.conf, and restart opensm",
        survey=mtu,
    ),
    Check(
        "rdma.ibdiagnet",
        "/var/tmp/ibdiagnet2/ibdiagnet2.log, where there is one",
        "ibdiagnet manual",
        "grep -e '-E-' {path}; sudo ibdiagnet  # on {host}",
        rule=report,
    ),
)
