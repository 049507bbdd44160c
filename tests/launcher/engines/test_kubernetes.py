"""Which pod stands for which host, and what is said of pods that do not run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.pod_settings import PodSettings
from hetctl.launcher.engines.entrance import choose_way
from hetctl.launcher.engines.kubectl import Kubectl, parse_pod
from hetctl.launcher.engines.kubernetes import pods_by_host
from hetctl.launcher.engines.kubernetes_manifests import CONTAINER, GROUP, PodGroup
from tests.launcher.engines.test_kubernetes_manifests import GREEN, host


def shown(name: str, *, node: str | None = None, state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A pod as `kubectl get pods --output=json` shows it, without what nobody reads."""
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient cpu."}
    return {
        "metadata": {"name": name, "labels": {GROUP: "green"}, "annotations": more.get("annotations", {})},
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": more.get("phase", "Pending"),
            **({"podIP": "10.1.0.9"} if node else {"conditions": [unscheduled]}),
            "containerStatuses": [{"name": CONTAINER, "state": state}] if state else [],
        },
    }


RUNNING: dict[str, Any] = {"phase": "Running", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def test_a_pod_stands_for_the_host_on_whose_node_it_is() -> None:
    pods = [parse_pod(shown("x", node="b", **RUNNING)), parse_pod(shown("y")), parse_pod(shown("z", node="other"))]
    group = PodGroup("green", GREEN, ("a", "b"))
    assert {h: pod.name for h, pod in pods_by_host(pods, [group]).items()} == {"b": "x"}
    assert [pod.ready for pod in pods] == [True, False, False]
    assert pods[1].words == "y: Pending, 0/3 nodes are available: 3 Insufficient cpu."


def test_where_any_node_will_do_its_index_says_which_host_it_is() -> None:
    note = {"batch.kubernetes.io/job-completion-index": "1"}
    pod = parse_pod(shown("x", node="whatever", annotations=note, **RUNNING))
    settings = PodSettings(image="x", any_node=True, node_selector={"a": "b"})
    assert list(pods_by_host([pod], [PodGroup("green", settings, ("a", "b"))])) == ["b"]


def test_an_image_that_cannot_be_pulled_is_hopeless() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}
    pod = parse_pod(shown("x", node="a", state=waiting))
    assert (pod.hopeless, pod.why) == (True, "Back-off pulling image x")
    creating = parse_pod(shown("x", node="a", state={"waiting": {"reason": "ContainerCreating"}}))
    assert (creating.hopeless, creating.why) == (False, "ContainerCreating")


def test_addresses_are_the_pods_own_and_those_that_multus_says() -> None:
    attached = [{"name": "cni", "ips": ["10.1.0.9"]}, {"name": "rail", "interface": "net1", "ips": ["192.168.1.4"]}]
    note = {"k8s.v1.cni.cncf.io/network-status": json.dumps(attached)}
    pod = parse_pod(shown("x", node="a", annotations=note, **RUNNING))
    assert pod.addresses == {"eth0": "10.1.0.9", "net1": "192.168.1.4"}


def test_one_run_is_in_one_namespace() -> None:
    kubectl = Kubectl.of([PodSettings(namespace="a", context="c"), PodSettings(namespace="a", context="c")])
    assert kubectl.words == ("kubectl", "--context=c", "--namespace=a")
    with pytest.raises(ConfigError, match="several namespaces: the current context/a, the current context/default"):
        Kubectl.of([PodSettings(namespace="a"), PodSettings()])


def test_hosts_that_are_pods_are_entered_as_pods_by_default() -> None:
    assert choose_way("auto", [host("a", GREEN)]) == "kubernetes"
    assert choose_way("ssh", [host("a", GREEN)]) == "ssh"
    with pytest.raises(ConfigError, match="unlike ways"):
        choose_way("auto", [host("a", GREEN), host("b", None)])
