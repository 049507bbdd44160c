"""What is unusual about a cluster: hosts that differ from their peers, degraded links, subnets that split. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.facts import GpuFacts, HostFacts, NicFacts
from hetctl.comm.contract.units import show_rate
from hetctl.discovery.fabric import Note, Report
from hetctl.discovery.links import rails_alike


def unusual(reports: Sequence[Report], cluster: Cluster) -> list[Note]:
    """Sentences on what a person should look at, host by host, the whole cluster first."""
    seen = {r.name: r.facts for r in reports if r.facts is not None}
    return [
        *_split_subnets(cluster),
        *(note for peers in _peer_groups(seen) for note in _odd_ones(peers)),
        *_slow_ports(seen),
        *_slow_pairs(cluster),
        *(Note(host, said) for host, facts in seen.items() for gpu in facts.gpus for said in _gpu(gpu)),
        *(Note(host, said) for host, facts in seen.items() for nic in facts.nics for said in _nic(nic)),
        *(Note(host, said) for host, facts in seen.items() for said in facts.warnings),
    ]


def _split_subnets(cluster: Cluster) -> Iterator[Note]:
    """Hosts of one vendor on InfiniBand subnets of which none holds all: the islands are split there."""
    for vendor in dict.fromkeys(i.vendor for i in cluster.islands):
        hosts = {m.host for i in cluster.islands if i.vendor == vendor for m in i.members}
        subnets = [n for n in cluster.networks if n.kind == "infiniband" and hosts & set(n.hosts)]
        reached = {h for n in subnets for h in n.hosts} & hosts
        if len(subnets) > 1 and not any(reached <= set(n.hosts) for n in subnets):
            each = "; ".join(f"{n.name}: {', '.join(h for h in n.hosts if h in hosts)}" for n in subnets)
            yield Note(None, f"{vendor} hosts are on {len(subnets)} InfiniBand subnets ({each})")


def _peer_groups(seen: Mapping[str, HostFacts]) -> Iterator[dict[str, HostFacts]]:
    """Hosts that hold the same products: peers, expected to be alike. Vendors are never compared."""
    groups: dict[tuple[str, ...], dict[str, HostFacts]] = defaultdict(dict)
    for host, facts in seen.items():
        products = tuple(sorted({f"{g.vendor} {g.name}" for g in facts.gpus}))
        if products:
            groups[products][host] = facts
    yield from (peers for peers in groups.values() if len(peers) > 1)


def _odd_ones(peers: Mapping[str, HostFacts]) -> Iterator[Note]:
    for what, feature in _features().items():
        values = {host: value for host, facts in peers.items() if (value := feature(facts)) not in (None, (), "")}
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        usual, times = counts.most_common(1)[0]
        if times == 1 or times == counts.most_common(2)[1][1]:
            each = "; ".join(f"{v} on {', '.join(h for h in values if values[h] == v)}" for v in counts)
            yield Note(None, f"{what} differs between peers: {each}")
            continue
        for host, value in values.items():
            if value != usual:
                yield Note(host, f"{what} is {value}, its peers have {usual}")


def _features() -> dict[str, Callable[[HostFacts], object]]:
    return {
        "the count of GPUs": lambda f: len(f.gpus),
        "the GPU driver": lambda f: _set(g.driver for g in f.gpus),
        "the GPU memory": lambda f: _set(g.memory_total_bytes and g.memory_total_bytes >> 30 for g in f.gpus),
        "the GPU partition": lambda f: _set(g.partition.mode for g in f.gpus),
        "the count of active RDMA ports": lambda f: sum(bool(n.rdma_device) and n.state == "active" for n in f.nics),
        "the RDMA firmware": lambda f: _set(f"{n.pci_id} {n.firmware}" for n in f.nics if n.rdma_device and n.firmware),
        "the kernel": lambda f: f.system.kernel,
        "the count of CPUs": lambda f: f.system.cpu.allowed,
        "torch": lambda f: _set(i.torch for i in f.interpreters),
        "NCCL": lambda f: _set(i.nccl for i in f.interpreters),
        "RCCL": lambda f: _set(i.rccl for i in f.interpreters),
        "the memlock limit": lambda f: f.rdma.memlock_bytes,
    }


def _slow_ports(seen: Mapping[str, HostFacts]) -> Iterator[Note]:
    """Ports slower than the fastest of the same product anywhere: a cable or a switch port that negotiated down."""
    best: dict[str, float] = {}
    for facts in seen.values():
        for nic in facts.nics:
            if nic.pci_id and nic.rate_bytes_per_s and nic.state != "down":
                best[nic.pci_id] = max(best.get(nic.pci_id, 0.0), nic.rate_bytes_per_s)
    for host, facts in seen.items():
        slow: dict[tuple[float, float], list[str]] = defaultdict(list)
        for nic in facts.nics:
            rate, most = nic.rate_bytes_per_s, best.get(nic.pci_id or "", 0.0)
            if rate and nic.state != "down" and rate < most:
                slow[rate, most].append(nic.name)
        for (rate, most), names in slow.items():
            run = "runs" if len(names) == 1 else "run"
            yield Note(
                host, f"{', '.join(names)} {run} at {show_rate(rate)} where others of the kind reach {show_rate(most)}"
            )


def _slow_pairs(cluster: Cluster) -> Iterator[Note]:
    """Measured rails at less than half of what rails of the same NICs usually reach."""
    for usual, rows, _ in rails_alike(cluster.measured):
        for row in rows:
            if row.rate_bytes_per_s is not None and row.rate_bytes_per_s * 2 < usual:
                between = f"{' - '.join(row.hosts)} over {'-'.join(row.nics)}"
                yield Note(None, f"{between} reached {show_rate(row.rate_bytes_per_s)}, its like {show_rate(usual)}")


def _gpu(gpu: GpuFacts) -> Iterator[str]:
    width, most = gpu.pcie.width, gpu.pcie.max_width
    if width is not None and most is not None and width < most:
        yield f"GPU {gpu.id} has {width} of its {most} PCIe lanes"
    if gpu.health.ecc_uncorrected:
        yield f"GPU {gpu.id} counts {gpu.health.ecc_uncorrected} uncorrected memory errors"
    if gpu.health.remap_failed:
        yield f"GPU {gpu.id} could not remap bad memory rows: replace it"
    if gpu.health.recovery_action not in (None, "none"):
        yield f"GPU {gpu.id}: its driver asks for '{gpu.health.recovery_action}'"
    if gpu.health.links_down:
        yield f"GPU {gpu.id} has {gpu.health.links_down} links to its peers down"


def _nic(nic: NicFacts) -> Iterator[str]:
    if nic.rdma_software:
        yield f"{nic.name} ({nic.rdma_device}) is RDMA emulated by the kernel: correct, but slower than TCP"
    width, most = nic.pcie.width, nic.pcie.max_width
    if nic.rdma_device and width is not None and most is not None and width < most:
        yield f"{nic.name} has {width} of its {most} PCIe lanes"
    if nic.rdma_device and nic.link_layer == "ethernet" and nic.gids and not any(g.routable for g in nic.gids):
        yield f"{nic.name} ({nic.rdma_device}) has no routable RoCE v2 GID: without an address it is TCP only"


def _set(values: Iterator[object]) -> object:
    """The distinct known values as one word, so that hosts can be compared; None when nothing is known."""
    known = sorted({str(v) for v in values if v is not None})
    return " and ".join(known) if known else None
