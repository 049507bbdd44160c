"""Kubernetes: a pod on each node that a run wants stands for that host, and is entered by `kubectl exec`."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import HetctlError, Unreachable
from hetctl.comm.contract.units import listed
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.engines.kubectl import FIRST, Kubectl, Pod
from hetctl.launcher.engines.kubernetes_manifests import PodGroup, groups_of, manifests
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import Shell, ShellError

LOOK_S = 1.0
BRIEFLY_S = 300.0  # that pods are waited for which no run wants: of discover, doctor, exec


class Kubernetes(Engine):
    """Pods that were made for a run, which last until it is over, or for a command, which go with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, tuple[Kubectl, Pod]] = {}
        self._made: list[tuple[Kubectl, str]] = []

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Have a pod for each host: those that the run has already, else new ones, as long as they are queued.

        For no run, those that do not run in time are left to `open` to tell of. Raises HetctlError.
        """
        with self._lock:
            self._take(places, run, say, BRIEFLY_S)

    def open(self, place: Place, deadline: Deadline) -> Shell:
        deadline.phase = f"waiting for the pod of {place.name}"
        with self._lock:
            if place.name not in self._pods:
                self._take([place], None, lambda said: None, deadline.left())
        kubectl, pod = self._pods[place.name]
        if not pod.ready:
            raise ShellError("timeout", f"its pod does not run: {pod.words}", hint="kubectl describe pod says why")
        deadline.phase = f"entering the pod {pod.name}"
        return LocalShell(kubectl.enter(pod.name))

    def address(self, place: Place, interface: str | None) -> tuple[str, str] | None:
        """A pod gets new addresses each time, unless it has its node's network."""
        held = self._pods.get(place.name)
        settings = place.access.kubernetes if place.access else None
        if held is None or (settings is not None and settings.host_network):
            return None
        addresses = held[1].addresses
        chosen = interface if interface is not None and interface in addresses else FIRST
        return (addresses[chosen], chosen) if chosen in addresses else None

    def close(self) -> None:
        for kubectl, name in self._made:
            with contextlib.suppress(HetctlError):  # they end by themselves
                kubectl.remove(name)
        self._made.clear()

    def _take(self, places: Sequence[Place], run: str | None, say: Callable[[str], None], seconds: float) -> None:
        groups, name = groups_of(places), run or uuid.uuid4().hex[:12]
        kubectl = Kubectl.of(group.settings for group in groups)
        if run is None:
            self._made.append((kubectl, name))
        found = pods_by_host(kubectl.pods(name), groups)
        if len(found) < len(places):
            kubectl.apply(manifests(name, groups, jobset=kubectl.has_jobsets))
        until = None if run else time.monotonic() + seconds
        for host, pod in _awaited(kubectl, name, groups, say, until).items():
            self._pods[host] = kubectl, pod


def pods_by_host(pods: Iterable[Pod], groups: Sequence[PodGroup]) -> dict[str, Pod]:
    """Which pod stands for which host: that on the node of its name, or where any node will do the one of its index."""
    found: dict[str, Pod] = {}
    for pod in pods:
        group = next((g for g in groups if g.name == pod.group), None)
        if group is None:
            continue
        place = pod.index if group.settings.any_node else None
        host = group.hosts[place] if place is not None and place < len(group.hosts) else pod.node
        if host in group.hosts:
            found[str(host)] = pod
    return found


def end_pods(run: str, hosts: Mapping[str, Access]) -> None:
    """Remove what holds a run's hosts; its processes end with it. Raises HetctlError."""
    settings = [access.kubernetes for access in hosts.values() if access.kubernetes]
    Kubectl.of(settings).remove(run)


def _awaited(
    kubectl: Kubectl, run: str, groups: Sequence[PodGroup], say: Callable[[str], None], until: float | None
) -> dict[str, Pod]:
    """The pods of all hosts once they run; with `until`, then those that there are."""
    hosts, told = [host for group in groups for host in group.hosts], ""
    while True:
        pods = kubectl.pods(run)
        found = pods_by_host(pods, groups)
        if lost := [pod.words for pod in pods if pod.hopeless]:
            raise Unreachable(f"pods do not start: {listed(lost, 4)}", hint="kubectl describe pod says more")
        waiting = [host for host in hosts if host not in found or not found[host].ready]
        if not waiting:
            return found
        if until is not None and time.monotonic() > until:
            return _with_absent(found, hosts)
        why = _why(waiting, pods, groups)
        if why != told:
            say(why)
            told = why
        time.sleep(LOOK_S)


def _with_absent(found: Mapping[str, Pod], hosts: Sequence[str]) -> dict[str, Pod]:
    return {host: found.get(host) or Pod("no pod", "", None, None, "never scheduled", {}, False) for host in hosts}


def _why(waiting: Sequence[str], pods: Sequence[Pod], groups: Sequence[PodGroup]) -> str:
    reasons = list(dict.fromkeys(pod.why for pod in pods if pod.why and not pod.ready))
    queues = list(dict.fromkeys(g.settings.queue for g in groups if g.settings.queue))
    if not reasons and not pods and queues:
        reasons = [f"queue {', '.join(queues)} has not let them begin"]
    return f"waiting for the pods of {listed(list(waiting), 8)}" + (f": {listed(reasons, 2)}" if reasons else "")
