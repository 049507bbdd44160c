"""What a person says of the pods that stand for hosts under Kubernetes; how they become manifests is the launcher's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetctl.comm.contract.errors import ConfigError

_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class PodSettings:
    """Of one host, or of a group of hosts that are alike; what is left out is left to the cluster."""

    image: str | None = None  # with Python, torch and numpy in it; hetctl itself is sent
    namespace: str | None = None  # that of kubectl's context
    context: str | None = None  # of the kubeconfig
    resources: Mapping[str, str | int] = field(default_factory=dict)  # of a pod: {vendor.com/gpu: 8, rdma/hca: 1}
    node_selector: Mapping[str, str] = field(default_factory=dict)  # labels of its nodes
    any_node: bool | None = None  # whether nodes with these labels will do; else it is the node of the host's name
    topology: str | None = None  # a node label: pods of the group stay where its value is the same
    tolerations: tuple[Mapping[str, Any], ...] = ()  # as a pod has them
    queue: str | None = None  # of Kueue
    volcano_queue: str | None = None  # of Volcano, which then schedules
    service_account: str | None = None  # whose token pods get; else they get none
    host_network: bool | None = None  # pods have the node's own network
    networks: tuple[str, ...] = ()  # further network attachments (Multus), by name
    shared_memory: str | None = None  # the most that /dev/shm takes: 64Gi
    secrets: tuple[str, ...] = ()  # names of Secrets whose keys become environment variables
    pull_secrets: tuple[str, ...] = ()  # names of Secrets with which images are pulled
    claims: Mapping[str, str] = field(default_factory=dict)  # path in the pod -> name of a PersistentVolumeClaim
    pod: Mapping[str, Any] = field(default_factory=dict)  # laid over the pod's spec, whatever else it needs
    group: str | None = None  # what the pods are named after: the inventory's group


def pods_over(below: PodSettings | None, above: PodSettings | None) -> PodSettings | None:
    """`above` laid over `below`: what it says wins, mappings are joined by key."""
    if below is None or above is None:
        return below if above is None else above
    said: dict[str, Any] = {}
    bare = PodSettings()
    for name in (f.name for f in fields(PodSettings)):
        low, high = getattr(below, name), getattr(above, name)
        if high != getattr(bare, name):
            said[name] = {**low, **high} if isinstance(high, Mapping) else high
    return replace(below, **said)


def check_pods(settings: PodSettings, where: str) -> None:
    """Raise ConfigError for what no API server would take, in the words of the file it stands in."""
    for name, amount in settings.resources.items():
        if not _QUANTITY.fullmatch(str(amount)):
            raise ConfigError(f"{where}.resources.{name}: {amount!r} is no quantity", hint="write 8, 500m or 64Gi")
    if settings.shared_memory is not None and not _QUANTITY.fullmatch(settings.shared_memory):
        raise ConfigError(f"{where}.shared_memory: {settings.shared_memory!r} is no quantity", hint="write 64Gi")
    for path in settings.claims:
        if not path.startswith("/"):
            raise ConfigError(f"{where}.claims: {path!r} is not a path from the root of the pod")
    if settings.namespace is not None and not _LABEL.fullmatch(settings.namespace):
        raise ConfigError(f"{where}.namespace: {settings.namespace!r} is not the name of a namespace")
    if settings.any_node and not settings.node_selector:
        raise ConfigError(
            f"{where}.any_node: pods could land on any node of the cluster",
            hint="say which nodes are alike: node_selector: {label: value}",
        )
