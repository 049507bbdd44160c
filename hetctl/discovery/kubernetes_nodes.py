"""The nodes of a Kubernetes cluster as hosts: their labels, allocatable resources and taints. Parsers are pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.facts import GpuFacts, HostFacts, System
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.pod_settings import PodSettings, pods_over
from hetctl.comm.contract.units import GiB, KiB, MiB, TiB, listed
from hetctl.discovery.fabric import Report
from hetctl.discovery.inventory import Inventory, InventoryHost
from hetctl.launcher.engines.kubectl import Kubectl
from hetctl.launcher.engines.kubernetes_manifests import RDMA

_UNITS = {"": 1, "Ki": KiB, "Mi": MiB, "Gi": GiB, "Ti": TiB, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IN_LABELS = {"": MiB, "M": MiB, "G": GiB}  # of a device's memory: labellers count in these
_QUANTITY = re.compile(r"(\d+)([KMGT]i|[kMGT])?")
_NO_GROUP = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Node:
    """A node: which vendor's devices it offers and how many, and what a pod needs so that it may have them."""

    name: str
    address: str | None
    memory_bytes: int | None
    gpus: Mapping[str, int]  # vendor -> how many may be asked for
    products: Mapping[str, str]  # vendor -> what its labels call them
    gpu_memory: Mapping[str, int]  # vendor -> bytes of each
    rdma: tuple[str, ...]  # resources that give a pod RDMA
    labels: Mapping[str, str]  # those that say which devices it has
    taints: tuple[Mapping[str, Any], ...]
    ready: bool


def parse_node(shown: Mapping[str, Any]) -> Node:
    """A node as `kubectl get nodes --output=json` shows it."""
    about, status = shown["metadata"], shown.get("status", {})
    labels, offered = about.get("labels", {}), status.get("allocatable", {})
    rows = {vendor: row for vendor, row in NATIVES.items() if row.resource}
    gpus = {vendor: count for vendor, row in rows.items() if (count := parse_quantity(offered.get(row.resource)))}
    telling = {row.product_label: labels[row.product_label] for row in rows.values() if row.product_label in labels}
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    addresses = {one["type"]: one["address"] for one in status.get("addresses", ())}
    return Node(
        name=about["name"],
        address=addresses.get("InternalIP"),
        memory_bytes=parse_quantity(offered.get("memory")),
        gpus=gpus,
        products={v: _spoken(labels[rows[v].product_label]) for v in gpus if rows[v].product_label in labels},
        gpu_memory={v: size for v in gpus if (size := parse_quantity(labels.get(rows[v].memory_label), _IN_LABELS))},
        rdma=tuple(name for name, amount in offered.items() if RDMA.search(name) and parse_quantity(amount)),
        labels=telling,
        taints=tuple(shown.get("spec", {}).get("taints", ())),
        ready=conditions.get("Ready") == "True" and not shown.get("spec", {}).get("unschedulable"),
    )


def pod_settings(node: Node) -> PodSettings:
    """What a pod says that has all devices of the node: resources, labels, tolerations of its devices' taints.

    Taints that ask pods to leave, or that say a node is not well, are left to a person.
    """
    resources = {NATIVES[vendor].resource: count for vendor, count in node.gpus.items()}
    tainted = [t for t in node.taints if t["effect"] == "NoSchedule" and t["key"] in resources]
    tolerations = tuple({"key": t["key"], "operator": "Exists", "effect": t["effect"]} for t in tainted)
    name = _NO_GROUP.sub("-", next(iter(node.products.values()), next(iter(node.gpus), "hosts")).lower())
    return PodSettings(
        resources={**resources, **dict.fromkeys(node.rdma, 1)},
        node_selector=node.labels,
        tolerations=tolerations,
        group=name.strip("-"),
    )


def hosts_of(nodes: Sequence[Node], meant: Inventory | None) -> Inventory:
    """The nodes that an inventory names, or all that have devices; what the inventory says wins.

    Raises ConfigError for hosts that are no nodes, and where no node has devices.
    """
    by_name = {node.name: node for node in nodes}
    if meant is None:
        entries = [InventoryHost(n.name, Access(n.name)) for n in nodes if n.gpus and n.ready]
        if not entries:
            wanted = listed([row.resource for row in NATIVES.values() if row.resource])
            hint = f"name the nodes that shall take part; device plugins offer {wanted}"
            raise ConfigError(f"no node of {len(nodes)} is ready and offers devices", hint=hint)
        return Inventory(tuple(_with_pods(e, by_name[e.name]) for e in entries), "Kubernetes")
    if strangers := [e.name for e in meant.entries if e.name not in by_name]:
        hint = nearest(strangers[0], by_name)
        raise ConfigError(f"Kubernetes knows no node {', '.join(strangers[:8])}", hint=hint)
    entries = [_with_pods(e, by_name[e.name]) for e in meant.entries]
    return replace(meant, entries=tuple(entries), origin=f"Kubernetes and {meant.origin}")


def from_kubernetes(meant: Inventory | None) -> tuple[Inventory, tuple[Report, ...]]:
    """The hosts to discover, and a report of each for which no image is named: what its node's labels say.

    Raises HetctlError.
    """
    said = [e.access.kubernetes for e in meant.entries if e.access.kubernetes] if meant else []
    nodes = [parse_node(one) for one in Kubectl.of(said).nodes()]
    hosts, by_name = hosts_of(nodes, meant), {node.name: node for node in nodes}
    unseen = [e for e in hosts.entries if not (e.access.kubernetes and e.access.kubernetes.image)]
    return hosts, tuple(report_of(entry, by_name[entry.name]) for entry in unseen)


def report_of(entry: InventoryHost, node: Node) -> Report:
    """What labels say of a node: its devices. Its NICs stay unknown, so islands are what one host holds."""
    facts = HostFacts(
        system=System(hostname=node.name, memory_total_bytes=node.memory_bytes),
        gpus=tuple(_gpus(node)),
        vendors=dict.fromkeys(node.gpus, "present"),
        sources={"gpus": "labels and allocatable resources of its Kubernetes node"},
        unknown={"nics": "its node's labels name none"},
    )
    address = entry.data_address or node.address
    return Report(name=entry.name, access=entry.access, facts=facts, data_address=address)


def _gpus(node: Node) -> Iterator[GpuFacts]:
    for vendor, count in node.gpus.items():
        for index in range(count):
            name, size = node.products.get(vendor), node.gpu_memory.get(vendor)
            yield GpuFacts(vendor=vendor, index=index, name=name, memory_total_bytes=size)


def _with_pods(entry: InventoryHost, node: Node) -> InventoryHost:
    settings = pods_over(pod_settings(node), entry.access.kubernetes)
    return replace(entry, access=replace(entry.access, way="kubernetes", kubernetes=settings))


def parse_quantity(said: str | None, units: Mapping[str, int] = _UNITS) -> int | None:
    """A quantity as Kubernetes writes it (`8`, `1k`, `263856Mi`), or in a label's own units; None where it is none."""
    found = _QUANTITY.fullmatch(said or "")
    unit = units.get(found[2] or "") if found else None
    return int(found[1]) * unit if found and unit else None


def _spoken(label: str) -> str:
    """A product's name, where labels may hold no spaces."""
    return re.sub(r"[-_]+", " ", label)
