"""kubectl as hetctl uses it: what holds a run's hosts is made, looked at and removed in one namespace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.pod_settings import PodSettings
from hetctl.launcher.engines.kubernetes_manifests import (
    CONTAINER,
    GRACE_S,
    GROUP,
    JOBSET_API,
    RUN,
    Manifest,
    label_of,
    owned,
)
from hetctl.launcher.engines.site_commands import ANSWER_S, asked

JOBSETS = "jobsets.jobset.x-k8s.io"
FIRST = "eth0"  # what container runtimes call the interface of the cluster's own network
_INDEX = "batch.kubernetes.io/job-completion-index"
_ATTACHED = "k8s.v1.cni.cncf.io/network-status"
_FATAL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


@dataclass(frozen=True)
class Pod:
    """A pod as it is now; `why` says in the cluster's words why it does not run, `hopeless` that it never will."""

    name: str
    group: str
    node: str | None
    index: int | None
    phase: str
    addresses: Mapping[str, str]  # interface -> IP address
    ready: bool
    why: str = ""
    hopeless: bool = False

    @property
    def words(self) -> str:
        """For people: `hetctl-3f-green-x2 on node1: Pending, 0/3 nodes are available`."""
        where = f" on {self.node}" if self.node else ""
        return f"{self.name}{where}: {self.phase}{f', {self.why}' if self.why else ''}"


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context and namespace; None is what the kubeconfig says."""

    context: str | None = None
    namespace: str | None = None

    @classmethod
    def of(cls, settings: Iterable[PodSettings]) -> Kubectl:
        """That of all these hosts. Raises ConfigError where they name several: one run is in one namespace."""
        found = list(dict.fromkeys((one.context, one.namespace) for one in settings))
        if len(found) > 1:
            places = ", ".join(f"{context or 'the current context'}/{name or 'default'}" for context, name in found)
            hint = "give all groups of the inventory the same kubernetes.namespace and context"
            raise ConfigError(f"the hosts are in several namespaces: {places}", hint=hint)
        return cls(*found[0]) if found else cls()

    @property
    def words(self) -> tuple[str, ...]:
        chosen = (("--context", self.context), ("--namespace", self.namespace))
        return ("kubectl", *(f"{option}={value}" for option, value in chosen if value))

    def enter(self, pod: str) -> tuple[str, ...]:
        """What comes before a command so that it runs in a pod, its stdin and stdout joined with ours."""
        return (*self.words, "exec", "--stdin", pod, f"--container={CONTAINER}", "--")

    @cached_property
    def has_jobsets(self) -> bool:
        """Whether the cluster knows JobSets. Raises HetctlError."""
        return JOBSET_API in self._ask("api-versions").split()

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes, as the API server shows them. Raises HetctlError."""
        return list(json.loads(self._ask("get", "nodes", "--output=json"))["items"])

    def pods(self, run: str) -> list[Pod]:
        """The pods of a run that are not over or about to be. Raises HetctlError."""
        shown = json.loads(self._ask("get", "pods", f"--selector={RUN}={label_of(run)}", "--output=json"))
        alive = (one for one in shown["items"] if "deletionTimestamp" not in one["metadata"])
        return [pod for pod in map(parse_pod, alive) if pod.phase not in ("Succeeded", "Failed")]

    def apply(self, made: Sequence[Manifest]) -> None:
        """Make these objects, the first of which owns the others. Raises HetctlError in the API server's words."""
        first = json.loads(self._ask("apply", "--filename=-", "--output=json", stdin=json.dumps(made[0])))
        if rest := [owned(one, first) for one in made[1:]]:
            everything = {"apiVersion": "v1", "kind": "List", "items": rest}
            self._ask("apply", "--filename=-", stdin=json.dumps(everything))

    def remove(self, run: str) -> None:
        """End all that was made for a run, and wait until it is gone. Raises HetctlError."""
        kinds = f"{JOBSETS},jobs" if self.has_jobsets else "jobs"
        whole = ("--ignore-not-found", "--cascade=foreground", "--wait")
        self._ask("delete", kinds, f"--selector={RUN}={label_of(run)}", *whole, seconds=ANSWER_S + 2 * GRACE_S)

    def _ask(self, *argv: str, stdin: str = "", seconds: float = ANSWER_S) -> str:
        hint = "install kubectl, and set KUBECONFIG if yours is not ~/.kube/config"
        return asked(*self.words, *argv, hint=hint, stdin=stdin, seconds=seconds)


def parse_pod(shown: Mapping[str, Any]) -> Pod:
    """A pod as `kubectl get --output=json` shows it."""
    about, spec, status = shown["metadata"], shown["spec"], shown.get("status", {})
    notes = about.get("annotations", {})
    index = notes.get(_INDEX, about["labels"].get(_INDEX))
    states = [one for one in status.get("containerStatuses", ()) if one["name"] == CONTAINER]
    held_up: Mapping[str, Any] = next(
        (waiting for one in states if (waiting := one.get("state", {}).get("waiting"))), {}
    )
    unmet = [c for c in status.get("conditions", ()) if c["type"] == "PodScheduled" and c["status"] != "True"]
    reason = str(held_up.get("reason", ""))
    said = held_up.get("message") or reason or (unmet[0].get("message", "") if unmet else "")
    return Pod(
        name=about["name"],
        group=about["labels"].get(GROUP, ""),
        node=spec.get("nodeName"),
        index=None if index is None else int(index),
        phase=status.get("phase", "Pending"),
        addresses=_addresses(notes.get(_ATTACHED), status.get("podIP")),
        ready=status.get("phase") == "Running" and any("running" in one.get("state", {}) for one in states),
        why=" ".join(str(said).split())[:300],
        hopeless=reason in _FATAL,
    )


def _addresses(attached: str | None, own: str | None) -> dict[str, str]:
    """Per interface its address, of further networks as Multus says it."""
    found = {FIRST: own} if own else {}
    try:
        networks = json.loads(attached or "[]")
    except ValueError:
        return found
    return found | {n["interface"]: n["ips"][0] for n in networks if n.get("interface") and n.get("ips")}
