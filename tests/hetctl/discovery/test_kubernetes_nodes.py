"""Nodes as the API server shows them become hosts; what a label does not say stays unknown."""

from __future__ import annotations

from typing import Any

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.pod_settings import PodSettings
from hetctl.discovery.inventory import Inventory, InventoryHost
from hetctl.discovery.kubernetes_nodes import hosts_of, parse_node, parse_quantity, pod_settings, report_of
from hetctl.discovery.transports import TransportFacts, rdma_missing


def node(name: str, resources: dict[str, str], labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """What `kubectl get nodes --output=json` has of a node, and what is read of it."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": more.get("spec", {}),
        "status": {
            "allocatable": {"cpu": "127", "memory": "1056270220Ki", **resources},
            "addresses": [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": "10.0.0.7"}],
            "conditions": [{"type": "Ready", "status": more.get("ready", "True")}],
        },
    }


RED = node(
    "red1",
    {"amd.com/gpu": "8", "rdma/shared": "1k", "example.com/rdma_off": "0"},
    {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"},
    spec={
        "taints": [
            {"key": "amd.com/gpu", "value": "yes", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"},
        ]
    },
)


def test_a_node_says_devices_memory_rdma_and_what_its_pods_need() -> None:
    red = parse_node(RED)
    assert (red.gpus, red.products) == ({"amd": 8}, {"amd": "AMD Instinct MI300X OAM"})
    assert red.gpu_memory == {"amd": 192 * 2**30}
    assert red.memory_bytes == 1056270220 * 1024
    assert pod_settings(red) == PodSettings(
        resources={"amd.com/gpu": 8, "rdma/shared": 1},
        node_selector={"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"},
        tolerations=({"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
        group="amd-instinct-mi300x-oam",
    )


def test_what_labels_do_not_say_is_unknown() -> None:
    bare = parse_node(node("bare", {"nvidia.com/gpu": "2"}))
    facts = report_of(InventoryHost("bare", Access("bare")), bare).facts
    assert facts is not None
    assert [(gpu.vendor, gpu.name, gpu.memory_total_bytes) for gpu in facts.gpus] == [("nvidia", None, None)] * 2
    assert facts.nics == ()
    assert rdma_missing(["bare", "other"], TransportFacts((), {"bare": facts, "other": facts}, {}, {})) == (
        "bare: whether it has RDMA ports is not known: its node's labels name none"
    )


def test_nodes_that_are_not_ready_or_have_no_devices_are_left_out() -> None:
    shown = [
        RED,
        node("down", {"nvidia.com/gpu": "8"}, ready="Unknown"),
        node("plain", {}),
        node("none", {"amd.com/gpu": "0"}),
    ]
    shown.append(node("closed", {"amd.com/gpu": "8"}, spec={"unschedulable": True}))
    assert [e.name for e in hosts_of([parse_node(one) for one in shown], None).entries] == ["red1"]
    with pytest.raises(ConfigError, match="no node of 1 is ready and offers devices"):
        hosts_of([parse_node(node("plain", {}))], None)


def test_what_the_inventory_says_wins_and_its_hosts_are_nodes() -> None:
    own = PodSettings(image="torch:rocm", resources={"amd.com/gpu": 4}, group="red")
    meant = Inventory((InventoryHost("red1", Access("red1", kubernetes=own), group="red"),), "inventory.yaml")
    (entry,) = hosts_of([parse_node(RED)], meant).entries
    assert entry.access.kubernetes is not None
    assert entry.access.kubernetes.image == "torch:rocm"
    assert entry.access.kubernetes.resources == {"amd.com/gpu": 4, "rdma/shared": 1}
    assert entry.access.kubernetes.group == "red"
    meant = Inventory((InventoryHost("red2", Access("red2")),), "inventory.yaml")
    with pytest.raises(ConfigError, match="Kubernetes knows no node red2") as caught:
        hosts_of([parse_node(RED)], meant)
    assert "red1" in caught.value.hint


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("8", 8),
        ("1k", 1000),
        ("16Gi", 2**34),
        ("1056270220Ki", 1056270220 * 1024),
        ("", None),
        (None, None),
        ("1.5", None),
    ],
)
def test_quantities(said: str | None, count: int | None) -> None:
    assert parse_quantity(said) == count
