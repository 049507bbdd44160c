"""What the counters of RDMA ports do while they are watched: errors, waiting for credits, pauses, congestion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetctl.comm.contract.facts import NicFacts
from hetctl.comm.contract.units import count_of, listed
from hetctl.doctor.check import Check, CheckedCluster, HostCase, Ports, over_networks
from hetctl.doctor.verdict import State, Verdict, ok, unknown, usual, warn, worst

WATCHING = {"rdma.counters", "rdma.credits", "roce.pfc_ecn"}
_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors")
_CONGESTION = ("np_cnp_sent", "rp_cnp_handled")
_WAITING_SHARE = 0.05  # of the time
_FULL = 2**32 - 1  # InfiniBand's counters stop at their end


@dataclass(frozen=True)
class Sign:
    """Counters (a pattern), what it means when they grow faster than `per_s`, and how bad that is."""

    counters: str
    state: State
    says: str
    per_s: float = 0.0

    def judge(self, port: NicFacts) -> Verdict | None:
        grown = {name: by for name, by in port.growing.items() if re.fullmatch(self.counters, name)}
        seconds = port.fabric.watched_s or 2.0
        if not grown or max(grown.values()) <= self.per_s * seconds:
            return None
        each = ", ".join(f"{name} +{by}" for name, by in grown.items())
        says = f"{port.name} {self.says}: {each} in {seconds:.0f} s"
        return Verdict(self.state, says, values={"device": port.rdma_device, "nic": port.netdev})


_LINK = (
    Sign(
        "symbol_error|link_downed|link_error_recovery|port_rcv_errors|local_link_integrity_errors"
        "|excessive_buffer_overrun_errors",
        "fail",
        "makes errors now",
    ),
    Sign("port_(rcv|xmit)_constraint_errors", "warn", "refuses packets of another partition"),
    Sign("VL15_dropped", "warn", "drops management packets"),
    Sign(
        "out_of_sequence|packet_seq_err|local_ack_timeout_err|rnr_nak_retry_err|roce_slow_restart",
        "warn",
        "has packets sent again",
        per_s=10,
    ),
)
_CREDITS = (Sign("port_xmit_discards", "fail", "discards packets that waited too long"),)
_PAUSES = (
    Sign("[tr]x_roce_discards", "fail", "discards RoCE packets now"),
    Sign("[tr]x_(prio\\d_)?discards(_phy)?", "warn", "discards packets now", per_s=1),
    Sign(
        "rx_prio\\d_pause|rx_global_pause|rx_pause_frames|rx_pfc_ena_frames_pri\\d|frames_rx_(pri)?pause"
        "|rx_priority_\\d_xoff(.nic)?",
        "warn",
        "is told to pause",
        per_s=100,
    ),
    Sign(
        "tx_prio\\d_pause|tx_global_pause|tx_pause_frames|tx_pfc_ena_frames_pri\\d|frames_tx_(pri)?pause"
        "|tx_priority_\\d_xoff(.nic)?",
        "warn",
        "tells others to pause: it takes in less than comes",
        per_s=100,
    ),
    Sign("np_cnp_sent|rp_cnp_handled|np_ecn_marked_roce_packets", "warn", "is congested now", per_s=100),
)


def integrity(case: HostCase) -> Verdict:
    """Errors that are made now; errors of the past are worth a look."""
    verdicts = []
    for port in (p for p in case.rdma_ports if p.state == "active"):
        total = {k: port.counters[k] for k in _ERRORS if port.counters.get(k)}
        now = [v for v in (sign.judge(port) for sign in _LINK) if v]
        verdicts += now
        if total and not now:
            each = ", ".join(f"{k} {v}" for k, v in total.items())
            verdicts.append(warn(f"{port.name} made errors since it was started: {each}", device=port.rdma_device))
        elif not port.counters and not port.rdma_software and not now:
            verdicts.append(unknown(f"{port.name} shows no counters"))
    ports = len(case.rdma_ports)
    return worst(verdicts, otherwise=f"{count_of(ports, 'port')} without errors" if ports else "no RDMA port here")


def credits(case: HostCase) -> Verdict:
    """InfiniBand's flow control: how long a port had something to send and no credit for it."""
    ports = [p for p in case.rdma_ports if p.state == "active" and p.link_layer == "infiniband"]
    verdicts = []
    for port in ports:
        verdicts += [v for v in (sign.judge(port) for sign in _CREDITS) if v]
        share = waiting_share(port)
        if "port_xmit_wait" not in port.counters:
            verdicts.append(unknown(f"{port.name} does not count how long it waits for credits (port_xmit_wait)"))
        elif port.counters["port_xmit_wait"] >= _FULL:
            clear = "sudo perfquery -C {device} -P {port} -R  # on {host}: starts it again at 0, and the port's others"
            says = f"{port.name} has counted its waiting to the end (port_xmit_wait has 32 bits)"
            verdicts.append(unknown(says, clear, device=port.rdma_device, port=port.rdma_port))
        elif share is None:
            verdicts.append(unknown(f"{port.name} was not watched"))
        elif share > _WAITING_SHARE:
            says = f"{port.name} could not send for about {100 * share:.0f} % of {port.fabric.watched_s:.0f} s"
            verdicts.append(warn(f"{says}: what it sends to takes in less", device=port.rdma_device))
    return worst(verdicts, otherwise="hardly a wait for credits" if ports else "no InfiniBand port in use")


def waiting_share(port: NicFacts) -> float | None:
    """About which part of the time a port waited: PortXmitWait counts ticks, whose length is the maker's choice.

    A tick is taken as the time of a 32-bit word at the port's rate, as PortXmitData counts; NVIDIA's are that or
    longer (ibdiagnet's manual, 'Congestion Assessment'), so that the share is rather too small.
    """
    if not port.rate_bytes_per_s or not port.fabric.watched_s:
        return None
    return min(1.0, 4 * port.growing.get("port_xmit_wait", 0) / (port.rate_bytes_per_s * port.fabric.watched_s))


def pfc_ecn(checked: CheckedCluster) -> Iterator[Verdict]:
    """RoCE's flow control: that it is on, for the same priorities everywhere, and seldom used."""
    networks: dict[str, list[tuple[str, NicFacts]]] = {}
    named = {(h.name, n.name): n.network for h in checked.cluster.hosts for n in h.nics}
    for host, port in checked.roce_ports:
        networks.setdefault(named.get((host, port.name)) or f"{host} {port.name}", []).append((host, port))
    return over_networks(checked, networks, _flow_control, otherwise="no RoCE port in use")


def _flow_control(ports: Ports) -> Iterator[tuple[str, Verdict]]:
    most = usual([p.fabric.pfc for _, p in ports if p.fabric.pfc is not None] or [()])
    for host, port in ports:
        found = [v for v in (sign.judge(port) for sign in _PAUSES) if v] + _stood_still(port)
        nic, on = port.netdev or port.name, port.fabric.pfc
        if found:
            yield from ((host, v) for v in found)
        elif on is None and not any(port.counters.get(name) for name in _CONGESTION):
            why = listed(sorted(port.fabric.unasked.values())) or "nobody was asked"
            says = f"{nic}: whether it has flow control is not known ({why}), and no congestion was signalled yet"
            yield host, unknown(says, nic=nic)
        elif on is not None and on != most:
            says = f"{nic} has flow control {_on(on)}, the others of its network {_on(most)}"
            yield host, warn(says, nic=nic)
        elif on == ():
            yield host, warn(f"{nic} has no priority with flow control: RoCE loses packets when it is busy", nic=nic)
        else:
            yield host, ok(f"flow control {_on(on)}" if on else "congestion is signalled")


def _stood_still(port: NicFacts) -> list[Verdict]:
    """Pauses by their length, which NVIDIA's NICs count in microseconds (mlx5 counters, kernel documentation)."""
    lengths = {k: v for k, v in port.growing.items() if re.fullmatch("rx_(prio\\d|global)_pause_duration", k)}
    share = max(lengths.values(), default=0) / 1e6 / (port.fabric.watched_s or 2.0)
    says = f"{port.name} stood still for {100 * min(share, 1.0):.0f} % of {port.fabric.watched_s or 2.0:.0f} s"
    return [warn(f"{says}: the switch made it pause", nic=port.netdev)] if share > _WAITING_SHARE else []


def _on(priorities: tuple[int, ...]) -> str:
    return f"on priority {listed([str(p) for p in priorities])}" if priorities else "on no priority"


CHECKS = (
    Check(
        "rdma.counters",
        "ports/*/{counters,hw_counters}, read twice",
        "Azure ib_link_flapping; CVS",
        "perfquery -x || rdma statistic show link {device}  # on {host}; reseat the cable",
        rule=integrity,
    ),
    Check(
        "rdma.credits",
        "ports/*/counters/{port_xmit_wait,port_xmit_discards}, read twice",
        "ibdiagnet manual, 'Congestion Assessment'",
        "sudo ibqueryerrors -s PortXmitWait --details  # on {host}: follow the waiting to the port that does not",
        rule=credits,
    ),
    Check(
        "roce.pfc_ecn",
        "dcb pfc or mlnx_qos; hw_counters and ethtool -S, read twice: pauses, congestion notices, discards",
        "AMD multi-node guide; node-scraper",
        "sudo dcb pfc show dev {nic}; sudo mlnx_qos -i {nic}  # on {host}; then NCCL_IB_TC for that priority",
        survey=pfc_ecn,
    ),
)
