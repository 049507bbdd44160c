"""From hosts to the objects that hold them under Kubernetes: a JobSet of one Job a group, or those Jobs. Pure.

A pod stands for a host: it has the node's devices, does nothing, and ends when nothing has run in it for a while.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.pod_settings import PodSettings
from hetctl.launcher.engines.engine import Place

Manifest = dict[str, Any]
RUN, GROUP = "hetctl.dev/run", "hetctl.dev/group"
CONTAINER = "hetctl"
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
IDLE_S = 300  # a pod in which nothing has run for so long ends: whoever wanted it is gone
TTL_S = 600  # how long objects whose pods have ended can be looked at
GRACE_S = 10
REPLACED = 1000  # times that pods which were lost are replaced; the run itself says when it gives up
RDMA = re.compile(r"rdma|hca|efa|roce", re.IGNORECASE)  # resources whose users register memory with a NIC
_NO_NAME = re.compile(r"[^a-z0-9]+")
HOLD = f"""\
trap 'exit 143' TERM
idle=0
while [ $idle -lt {IDLE_S} ]; do
  sleep 5 & wait $!
  set -- /proc/[0-9]*
  if [ $# -gt 1 ]; then idle=0; else idle=$((idle + 5)); fi
done
"""


@dataclass(frozen=True)
class PodGroup:
    """Hosts whose pods are alike: one Job. `name` is unique among the groups of a run."""

    name: str
    settings: PodSettings
    hosts: tuple[str, ...]


def groups_of(places: Sequence[Place]) -> tuple[PodGroup, ...]:
    """Hosts by their pods' settings, in order. Raises ConfigError naming those without an image."""
    bare = [p.name for p in places if not (p.access and p.access.kubernetes and p.access.kubernetes.image)]
    if bare:
        hint = "in inventory.yaml: kubernetes: {image: ...} of its group; then `hetctl discover --from kubernetes`"
        raise ConfigError(f"no image is named for the pods of {', '.join(bare[:8])}", hint=hint)
    alike: list[tuple[PodSettings, list[str]]] = []
    for place in places:
        assert place.access is not None
        assert place.access.kubernetes is not None
        settings = place.access.kubernetes
        known = next((hosts for one, hosts in alike if one == settings), None)
        if known is None:
            alike.append((settings, known := []))
        known.append(place.name)
    names = _names([settings.group or "hosts" for settings, _ in alike])
    return tuple(PodGroup(name, one, tuple(hosts)) for name, (one, hosts) in zip(names, alike, strict=True))


def manifests(run: str, groups: Sequence[PodGroup], *, jobset: bool) -> list[Manifest]:
    """What holds the hosts of a run: one JobSet, or Jobs, of which the first is to own the others (`owned`).

    Raises ConfigError for a JobSet whose groups name several queues of Kueue: it waits in one.
    """
    if not jobset:
        return [_job(f"hetctl-{label_of(run)}-{g.name}", run, g) for g in groups]
    queues = dict.fromkeys(g.settings.queue for g in groups)
    if len(queues) > 1:
        raise ConfigError(
            f"the hosts of one JobSet wait in one queue, not in {', '.join(str(q or 'none') for q in queues)}",
            hint="give all groups of the inventory the same kubernetes.queue",
        )
    replicated = [{"name": g.name, "replicas": 1, "template": _child(run, g)} for g in groups]
    spec = {
        "replicatedJobs": replicated,
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": False},
        "ttlSecondsAfterFinished": TTL_S,
    }
    about = {"name": f"hetctl-{label_of(run)}", "labels": {RUN: label_of(run), **_queue(groups[0].settings)}}
    return [{"apiVersion": JOBSET_API, "kind": "JobSet", "metadata": about, "spec": spec}]


def owned(manifest: Manifest, owner: Mapping[str, Any]) -> Manifest:
    """A manifest that goes with its owner (an object as the API server shows it)."""
    reference = {k: owner[k] for k in ("apiVersion", "kind")} | {k: owner["metadata"][k] for k in ("name", "uid")}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def label_of(run: str) -> str:
    """A run in the names and labels of its objects: the end of its identity is what tells it from others."""
    return _NO_NAME.sub("-", run.lower())[-24:].strip("-")


def _names(asked: Sequence[str]) -> list[str]:
    """Each as a DNS label of at most 20 characters, no two alike: pods are named after their group."""
    found: list[str] = []
    for word in asked:
        base = _NO_NAME.sub("-", word.lower()).strip("-")[:16].strip("-") or "hosts"
        same = sum(re.fullmatch(rf"{re.escape(base)}(-\d+)?", name) is not None for name in found)
        while (name := f"{base}-{same + 1}" if same else base) in found:
            same += 1
        found.append(name)
    return found


def _child(run: str, group: PodGroup) -> Manifest:
    job = _job("", run, replace(group, settings=replace(group.settings, queue=None)))  # the JobSet waits, not its Jobs
    about = {key: value for key, value in job["metadata"].items() if key != "name"}
    return {"metadata": about, "spec": {k: v for k, v in job["spec"].items() if k != "ttlSecondsAfterFinished"}}


def _job(name: str, run: str, group: PodGroup) -> Manifest:
    settings, count = group.settings, len(group.hosts)
    labels = {RUN: label_of(run), GROUP: group.name}
    notes = {"scheduling.volcano.sh/queue-name": settings.volcano_queue} if settings.volcano_queue else {}
    more = {"k8s.v1.cni.cncf.io/networks": ", ".join(settings.networks)} if settings.networks else {}
    spec: Manifest = {
        "completions": count,
        "parallelism": count,
        "backoffLimit": REPLACED,
        "ttlSecondsAfterFinished": TTL_S,
        "template": {
            "metadata": _without_empty({"labels": labels, "annotations": notes | more}),
            "spec": laid_over(_pod(run, group), settings.pod),
        },
    }
    if settings.any_node:  # the index says which host a pod stands for; else its node does
        spec["completionMode"] = "Indexed"
    about = {"name": name, "labels": {**labels, **_queue(settings)}, "annotations": notes}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _without_empty(about), "spec": spec}


def _queue(settings: PodSettings) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}


def _pod(run: str, group: PodGroup) -> Manifest:
    settings = group.settings
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "enableServiceLinks": False,
        "automountServiceAccountToken": settings.service_account is not None,
        "serviceAccountName": settings.service_account,
        "schedulerName": "volcano" if settings.volcano_queue else None,
        "hostNetwork": settings.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if settings.host_network else None,
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "affinity": _affinity(run, group),
        "containers": [_container(settings)],
        "volumes": list(_volumes(settings)),
    }
    return _without_empty(spec)


def _container(settings: PodSettings) -> Manifest:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": f"claim-{n}", "mountPath": path} for n, path in enumerate(settings.claims)]
    locks = any(RDMA.search(name) for name in settings.resources)
    return _without_empty(
        {
            "name": CONTAINER,
            "image": settings.image,
            "command": ["sh", "-c", HOLD],
            "resources": {"limits": {k: str(v) for k, v in settings.resources.items()}} if settings.resources else {},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}} if locks else {},
            "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
            "volumeMounts": mounts,
        }
    )


def _volumes(settings: PodSettings) -> Iterator[Manifest]:
    limit = {"sizeLimit": settings.shared_memory} if settings.shared_memory else {}
    yield {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}
    for number, claim in enumerate(settings.claims.values()):
        yield {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}


def _affinity(run: str, group: PodGroup) -> Manifest:
    """The group's nodes, each of which gets one pod of the run; together where a topology is asked for."""
    always = "requiredDuringSchedulingIgnoredDuringExecution"
    alone = {"labelSelector": {"matchLabels": {RUN: label_of(run)}}, "topologyKey": "kubernetes.io/hostname"}
    found: Manifest = {"podAntiAffinity": {always: [alone]}}
    if not group.settings.any_node:
        own = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [h]}]} for h in group.hosts]
        found["nodeAffinity"] = {always: {"nodeSelectorTerms": own}}
    if group.settings.topology:
        own_labels = {RUN: label_of(run), GROUP: group.name}
        near = {"labelSelector": {"matchLabels": own_labels}, "topologyKey": group.settings.topology}
        found["podAffinity"] = {always: [near]}
    return found


def laid_over(base: Any, patch: Any) -> Any:
    """A person's patch over what we wrote: mappings key by key, lists of named things by name, other lists joined."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        return {**base, **{k: laid_over(base[k], v) if k in base else v for k, v in patch.items()}}
    if not (isinstance(base, list) and isinstance(patch, (list, tuple))):
        return patch
    named = {one["name"]: one for one in patch if isinstance(one, Mapping) and "name" in one}
    kept = [laid_over(one, named.pop(one["name"])) if _name(one) in named else one for one in base]
    return [*kept, *(one for one in patch if _name(one) is None or _name(one) in named)]


def _name(one: Any) -> Any:
    return one.get("name") if isinstance(one, Mapping) else None


def _without_empty(data: Manifest) -> Manifest:
    return {key: value for key, value in data.items() if value not in (None, {}, [])}
