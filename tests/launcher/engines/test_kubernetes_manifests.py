"""What holds a run's hosts under Kubernetes: valid by the published schemas, and what a person said in its place."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.comm.contract.cluster import Access, Host
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.pod_settings import PodSettings, check_pods, pods_over
from hetctl.launcher.engines.kubernetes_manifests import (
    GROUP,
    HOLD,
    IDLE_S,
    RUN,
    groups_of,
    label_of,
    laid_over,
    manifests,
    owned,
)

WHY_NOT = "the published schemas are missing: pip install -e '.[manifests]'"
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=WHY_NOT)
JobsetV1alpha2JobSet = pytest.importorskip(
    "kubeflow_trainer_api.models.jobset_v1alpha2_job_set", reason=WHY_NOT
).JobsetV1alpha2JobSet

GREEN = PodSettings(image="torch:cuda", resources={"nvidia.com/gpu": 8, "rdma/hca": 1}, group="green")
RED = PodSettings(image="torch:rocm", resources={"amd.com/gpu": 4}, group="red")
DNS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
words = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
texts = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=40)
pod_settings = st.builds(
    PodSettings,
    image=st.just("registry.example/torch:1"),
    resources=st.dictionaries(st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "rdma/hca", "cpu"]), st.integers(1, 9)),
    node_selector=st.dictionaries(words, words, max_size=2),
    any_node=st.sampled_from([None, True, False]),
    topology=st.none() | st.just("topology.kubernetes.io/zone"),
    tolerations=st.just(()) | st.just(({"key": "amd.com/gpu", "operator": "Exists"},)),
    queue=st.none() | st.just("teams"),
    volcano_queue=st.none() | words,
    service_account=st.none() | words,
    host_network=st.sampled_from([None, True]),
    networks=st.lists(words, max_size=2, unique=True).map(tuple),
    shared_memory=st.none() | st.just("64Gi"),
    secrets=st.lists(words, max_size=2, unique=True).map(tuple),
    pull_secrets=st.lists(words, max_size=2, unique=True).map(tuple),
    claims=st.dictionaries(words.map("/{}".format), words, max_size=2),
    group=st.none() | texts,
)


def host(name: str, pods: PodSettings | None) -> Host:
    return Host(name, Access(name, way="kubernetes" if pods else None, kubernetes=pods))


@st.composite
def clusters(draw: st.DrawFn) -> list[Host]:
    """Hosts of up to three kinds, in any order; all wait in one queue, as a JobSet must."""
    kinds = draw(st.lists(pod_settings, min_size=1, max_size=3))
    kinds = [replace(kind, queue=kinds[0].queue) for kind in kinds]
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=7))
    return [host(f"node{number}", kinds[pick]) for number, pick in enumerate(picks)]


def jobs_in(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Jobs among manifests, and those that a JobSet would make."""
    jobset = made[0]["kind"] == "JobSet"
    parts = made[0]["spec"]["replicatedJobs"] if jobset else []
    children = [{"apiVersion": "batch/v1", "kind": "Job", **p["template"]} for p in parts]
    return [{**c, "metadata": {"name": "of-a-set", **c["metadata"]}} for c in children] if jobset else made


@settings(max_examples=40, deadline=None)
@given(hosts=clusters(), run=texts.map(lambda text: text + "-1a2b3c4d"), jobset=st.booleans())
def test_manifests_are_valid_and_hold_every_host_once(hosts: list[Host], run: str, jobset: bool) -> None:
    groups = groups_of(hosts)
    assert sorted(h for g in groups for h in g.hosts) == sorted(h.name for h in hosts)
    made = manifests(run, groups, jobset=jobset)
    if jobset:
        parsed = JobsetV1alpha2JobSet.from_dict(made[0])
        assert parsed is not None
        assert parsed.to_dict() == made[0], "nothing that the published type does not have"
    for job, group in zip(jobs_in(made), groups, strict=True):
        kubernetes_validate.validate(job, "1.37", strict=True)
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(group.hosts)
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert (labels[RUN], labels[GROUP]) == (label_of(run), group.name)
    names = [one["metadata"]["name"] for one in made]
    if jobset:  # names its Jobs itself
        names += [f"{names[0]}-{group.name}-0" for group in groups]
    assert all(DNS.fullmatch(name) and len(name) <= 57 for name in names), "room is left for -x1y2z"
    assert len({g.name for g in groups}) == len(groups)


def job_of(pods: PodSettings, count: int = 2) -> dict[str, Any]:
    return manifests("run-1", groups_of([host(f"n{i}", pods) for i in range(count)]), jobset=False)[0]


def test_a_group_is_a_job_on_its_own_nodes_one_pod_each() -> None:
    made = manifests("r-1", groups_of([host("a", GREEN), host("m", RED), host("b", GREEN)]), jobset=False)
    green, red = (one["spec"]["template"]["spec"] for one in made)
    terms = green["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchFields"][0]["values"] for term in terms] == [["a"], ["b"]]
    assert [one["containers"][0]["image"] for one in (green, red)] == ["torch:cuda", "torch:rocm"]
    assert green["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8", "rdma/hca": "1"}}
    assert green["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}, "RDMA pins memory"
    assert "securityContext" not in red["containers"][0]
    apart = green["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart == {"labelSelector": {"matchLabels": {RUN: "r-1"}}, "topologyKey": "kubernetes.io/hostname"}
    assert green["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert not green["automountServiceAccountToken"]


def test_queues_secrets_networks_and_topology_go_where_they_belong() -> None:
    pods = replace(
        GREEN,
        queue="team",
        volcano_queue="v",
        secrets=("keys",),
        networks=("rail-a", "rail-b"),
        host_network=True,
        claims={"/root/.local": "state"},
        any_node=True,
        node_selector={"nvidia.com/gpu.product": "NVIDIA-H200"},
        topology="block",
    )
    job = job_of(pods)
    spec = job["spec"]["template"]["spec"]
    notes = job["spec"]["template"]["metadata"]["annotations"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert (spec["schedulerName"], notes["scheduling.volcano.sh/queue-name"]) == ("volcano", "v")
    assert notes["k8s.v1.cni.cncf.io/networks"] == "rail-a, rail-b"
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert spec["volumes"][1] == {"name": "claim-0", "persistentVolumeClaim": {"claimName": "state"}}
    assert spec["containers"][0]["volumeMounts"][1] == {"name": "claim-0", "mountPath": "/root/.local"}
    assert (
        spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "block"
    )
    assert job["spec"]["completionMode"] == "Indexed"
    assert "nodeAffinity" not in spec["affinity"]


def test_a_jobset_waits_in_one_queue_and_its_jobs_in_none() -> None:
    both = groups_of([host("a", replace(GREEN, queue="q")), host("b", replace(RED, queue="q"))])
    (made,) = manifests("r", both, jobset=True)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert "kueue" not in json.dumps(made["spec"])
    with pytest.raises(ConfigError, match="one queue, not in q, none"):
        manifests("r", groups_of([host("a", replace(GREEN, queue="q")), host("b", RED)]), jobset=True)


def test_a_patch_is_laid_over_the_pod() -> None:
    patch = {
        "priorityClassName": "high",
        "containers": [{"name": "hetctl", "securityContext": {"privileged": True}}, {"name": "beside", "image": "x"}],
        "volumes": [{"name": "scratch", "hostPath": {"path": "/scratch"}}],
    }
    spec = job_of(replace(GREEN, pod=patch))["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "high"
    assert [one["name"] for one in spec["containers"]] == ["hetctl", "beside"]
    about = {"capabilities": {"add": ["IPC_LOCK"]}, "privileged": True}
    assert spec["containers"][0]["securityContext"] == about
    assert [one["name"] for one in spec["volumes"]] == ["shm", "scratch"]
    assert laid_over([1], [2]) == [1, 2]


def test_the_first_job_owns_the_others() -> None:
    shown = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "first", "uid": "u"}, "spec": {}}
    job = owned(job_of(RED), shown)
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "first", "uid": "u"}
    assert job["metadata"]["ownerReferences"] == [reference]
    kubernetes_validate.validate(job, "1.37", strict=True)


def test_hosts_without_an_image_are_named() -> None:
    with pytest.raises(ConfigError, match="no image is named for the pods of b, c"):
        groups_of([host("a", GREEN), host("b", PodSettings()), host("c", None)])


def test_settings_of_a_host_lie_over_those_of_its_group() -> None:
    low = PodSettings(image="a", node_selector={"x": "1", "y": "1"}, queue="q")
    high = PodSettings(image="b", node_selector={"y": "2"})
    assert pods_over(low, high) == PodSettings(image="b", node_selector={"x": "1", "y": "2"}, queue="q")
    assert pods_over(None, high) == pods_over(high, None) == high


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (PodSettings(resources={"cpu": "many"}), "resources.cpu: 'many' is no quantity"),
        (PodSettings(shared_memory="big"), "shared_memory: 'big' is no quantity"),
        (PodSettings(claims={"data": "x"}), "claims: 'data' is not a path from the root"),
        (PodSettings(namespace="Mine"), "namespace: 'Mine' is not the name of a namespace"),
        (PodSettings(any_node=True), "any_node: pods could land on any node"),
    ],
)
def test_what_no_api_server_takes_is_refused_in_the_inventorys_words(bad: PodSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_pods(bad, "inventory.yaml.groups.green.kubernetes")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="PID namespaces need root and util-linux")
def test_a_pod_ends_once_nothing_runs_in_it(tmp_path: Path) -> None:
    """The very script of a pod, with seconds for minutes."""
    quick = HOLD.replace(str(IDLE_S), "2").replace("sleep 5", "sleep 0.5").replace("idle + 5", "idle + 1")
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    begin = time.monotonic()
    assert subprocess.run([*apart, quick], timeout=60).returncode == 0
    assert time.monotonic() - begin < 30
    busy = subprocess.Popen([*apart, f"sleep 300 & {quick}"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(4)
        children = Path(f"/proc/{busy.pid}/task/{busy.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert busy.wait(30) == 143, "asked to end it does so at once, and is replaced"
    finally:
        busy.kill()
