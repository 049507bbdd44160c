"""Kubernetes over the namespaced hosts of a rig: a real etcd, API server, scheduler and controllers, and real kubectl.

What stands in is the kubelet: a pod's container is a process in a PID namespace of its own on its node's network, on
this machine's files, whatever its image; and `kubectl exec`, which enters that process's namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Host, load_cluster, save_cluster
from hetctl.comm.contract.pod_settings import PodSettings
from tests.rigs import netns

TOOLS = Path(os.environ.get("HETCTL_KUBERNETES", Path.home() / ".cache/hetctl-test-tools/kubernetes"))
NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
CONTROLLERS = "job,garbagecollector,ttl-after-finished"
TOKEN = "of-a-test"
BAD_IMAGE = "registry.test/none"  # that no node can pull
EXEC = """\
#!{python} -I
import json, os, sys
words = sys.argv[1:]
if "exec" not in words:
    os.execv({kubectl!r}, ["kubectl", "--kubeconfig={config}", *words])
pod = words[words.index("--stdin") + 1]
argv = words[words.index("--") + 1 :]
try:
    held = json.load(open(os.path.join({pods!r}, pod)))
    os.kill(held["pid"], 0)
except (OSError, ValueError):
    sys.exit(f'Error from server (NotFound): pods "{{pod}}" not found')
environment = {{"HOME": held["home"], "PATH": held["path"]}}
enter = ["nsenter", f"--target={{held['pid']}}", "--pid", "--mount", "--net", "--", *argv]
os.execvpe("nsenter", enter, environment)
"""


def unavailable() -> str:
    """Why there is no Kubernetes here, '' where there is."""
    if why := netns.unavailable():
        return why
    if missing := [tool for tool in NEEDED if not (TOOLS / tool).is_file()]:
        return (
            f"Kubernetes' control plane needs {', '.join(missing)}: tests/rigs/build_kubernetes.sh {TOOLS} (Debian 12)"
        )
    return ""


@dataclass(frozen=True)
class NodeSpec:
    """A node as its cluster shows it."""

    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()


GREEN = NodeSpec(
    {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"},
    {"nvidia.com/gpu": "8", "rdma/hca": "1k"},
)
RED = NodeSpec(
    {"amd.com/gpu.product-name": "AMD_Instinct_MI325X_OAM", "amd.com/gpu.vram": "256G"},
    {"amd.com/gpu": "4"},
    [{"key": "amd.com/gpu", "value": "present", "effect": "NoSchedule"}],
)
PODS = {
    "h200": PodSettings(image="torch:cuda", resources={"nvidia.com/gpu": 8}, group="green"),
    "mi325x": PodSettings(
        image="torch:rocm",
        resources={"amd.com/gpu": 4},
        group="red",
        tolerations=({"key": "amd.com/gpu", "operator": "Exists"},),
    ),
}


def as_pods(file: Path, pods: dict[str, PodSettings]) -> None:
    """Have the hosts of a cluster file entered as pods; where ranks talk is left for their pods to say."""
    cluster = load_cluster(file)

    def entered(host: Host) -> Host:
        assert host.access is not None
        settings = pods[host.devices[0].device_class]
        return replace(host, access=replace(host.access, way="kubernetes", kubernetes=settings), data_address=None)

    save_cluster(file, replace(cluster, hosts=tuple(map(entered, cluster.hosts))))


class Api:
    """The API server, asked as its nodes ask it."""

    def __init__(self, port: int) -> None:
        self.base = f"https://127.0.0.1:{port}"
        self._tls = ssl._create_unverified_context()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        head = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, head, method=method)
        with urllib.request.urlopen(request, context=self._tls, timeout=30) as answer:
            return json.loads(answer.read() or b"null")


@dataclass(frozen=True)
class Site:
    """A cluster, as somebody sees it whose kubectl knows it."""

    rig: netns.Rig
    api: Api
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "KUBECONFIG": str(self.folder / "config")}

    def kubectl(self, *words: str) -> str:
        argv = [str(self.folder / "bin" / "kubectl"), *words]
        done = subprocess.run(argv, text=True, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def names(self, kinds: str = "jobs,pods") -> list[str]:
        """What there is now of the objects that runs make."""
        return self.kubectl("get", kinds, "--output=name").split()

    def pods(self) -> list[dict[str, Any]]:
        return list(self.api.ask("GET", "/api/v1/namespaces/default/pods")["items"])

    def until(self, true: Callable[[], bool], *, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.kubectl("get", "jobs,pods,events")
            time.sleep(0.2)


@contextlib.contextmanager
def kubernetes(rig: netns.Rig, nodes: Sequence[NodeSpec], folder: Path) -> Iterator[Site]:
    """Kubernetes on the rig's hosts as long as the block lasts."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pods").mkdir()
    etcd, peer, port = _free_ports(3)
    api, daemons = Api(port), list[subprocess.Popen[bytes]]()

    def start(tool: str, *options: str) -> None:
        with (folder / f"{tool}.log").open("wb") as out:
            argv = [str(TOOLS / tool), *options]
            daemons.append(subprocess.Popen(argv, stdout=out, stderr=out, cwd=folder, start_new_session=True))

    _write_keys(folder, port)
    site = Site(rig, api, folder)
    stop = threading.Event()
    try:
        urls = f"http://127.0.0.1:{etcd}"
        peers = f"http://127.0.0.1:{peer}"
        clients = (f"--listen-client-urls={urls}", f"--advertise-client-urls={urls}", f"--listen-peer-urls={peers}")
        start("etcd", f"--data-dir={folder}/etcd", *clients, "--unsafe-no-fsync")
        start("kube-apiserver", *_server_options(folder, port, urls))
        site.until(lambda: _answers(api), seconds=90)
        quiet = ("--leader-elect=false", "--port=0", "--secure-port=0", f"--kubeconfig={folder}/config")
        start(
            "kube-controller-manager", *quiet, f"--controllers={CONTROLLERS}", "--feature-gates=TTLAfterFinished=true"
        )
        start("kube-scheduler", *quiet)
        for host, spec in zip(rig.hosts, nodes, strict=True):
            _register(api, host, spec)
        kubelet = threading.Thread(target=_Kubelet(site).run, args=(stop,), daemon=True)
        kubelet.start()
        yield site
    finally:
        stop.set()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)
            daemon.kill()


class _Kubelet:
    """Of all nodes of a rig: starts the pods that are bound to them, says how they are, ends them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.hosts = {host.name: host for host in site.rig.hosts}
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # by name of pod
        self.ending: dict[str, float] = {}

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(OSError, ValueError):  # the API server is ending, or somebody was faster
                for pod in self.site.pods():
                    with contextlib.suppress(urllib.error.HTTPError):
                        self._look_after(pod)
        for name, process in self.running.items():
            process.kill()
            process.wait()
            (self.site.folder / "pods" / name).unlink(missing_ok=True)

    def _look_after(self, pod: dict[str, Any]) -> None:
        about, node = pod["metadata"], pod["spec"].get("nodeName")
        name, phase = about["name"], pod["status"].get("phase", "Pending")
        process = self.running.get(name)
        if node not in self.hosts:
            return
        if "deletionTimestamp" in about:
            self._end(pod, process)
        elif process is not None and process.poll() is not None and phase == "Running":
            over = "Succeeded" if process.returncode == 0 else "Failed"
            self._say(pod, over, {"terminated": {"exitCode": abs(process.returncode)}})
        elif process is None and phase == "Pending":
            self._begin(pod, self.hosts[node])

    def _begin(self, pod: dict[str, Any], host: netns.RigHost) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        if container["image"].startswith(BAD_IMAGE):
            waiting = {"reason": "ErrImagePull", "message": f"no such image: {container['image']}"}
            self._say(pod, "Pending", {"waiting": waiting}, host)
            return
        path = f"{host.folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        process = subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, *apart, *container["command"]],
            env={"HOME": str(host.folder / "home"), "PATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.running[name] = process
        held = {"pid": _child_of(process.pid), "home": str(host.folder / "home"), "path": path}
        (self.site.folder / "pods" / name).write_text(json.dumps(held))
        self._say(pod, "Running", {"running": {}}, host)

    def _end(self, pod: dict[str, Any], process: subprocess.Popen[bytes] | None) -> None:
        name, grace = pod["metadata"]["name"], float(pod["metadata"].get("deletionGracePeriodSeconds", 0))
        if process is not None and process.poll() is None:
            first = self.ending.setdefault(name, time.monotonic())
            inner = json.loads((self.site.folder / "pods" / name).read_text())["pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, signal.SIGTERM if time.monotonic() - first < grace else signal.SIGKILL)
            return
        (self.site.folder / "pods" / name).unlink(missing_ok=True)
        where = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{name}"
        self.site.api.ask("DELETE", where, {"gracePeriodSeconds": 0})

    def _say(self, pod: dict[str, Any], phase: str, state: dict[str, Any], host: netns.RigHost | None = None) -> None:
        container = pod["spec"]["containers"][0]
        told = {"name": container["name"], "image": container["image"], "imageID": "", "ready": phase == "Running"}
        status = {"phase": phase, "containerStatuses": [{**told, "restartCount": 0, "state": state}]}
        if host is not None:
            status["podIP"] = host.address
        where = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        self.site.api.ask("PATCH", where, {"status": status})


def _child_of(pid: int) -> int:
    """The first process of a new PID namespace: the only child of what made it."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(found[0])
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} made no namespace")


def _register(api: Api, host: netns.RigHost, spec: NodeSpec) -> None:
    room = {"cpu": "8", "memory": "256Gi", "pods": "20", **spec.resources}
    about = {"name": host.name, "labels": {"kubernetes.io/hostname": host.name, **spec.labels}}
    ready = {"type": "Ready", "status": "True", "reason": "StandIn", "message": "a test's kubelet"}
    status = {
        "capacity": room,
        "allocatable": room,
        "conditions": [ready],
        "addresses": [{"type": "InternalIP", "address": host.address}],
    }
    node = {"apiVersion": "v1", "kind": "Node", "metadata": about, "spec": {"taints": list(spec.taints)}}
    api.ask("POST", "/api/v1/nodes", node)
    api.ask("PATCH", f"/api/v1/nodes/{host.name}/status", {"status": status})


def _answers(api: Api) -> bool:
    try:
        api.ask("GET", "/api/v1/namespaces/default")
        return True
    except OSError:
        return False


def _server_options(folder: Path, port: int, etcd: str) -> Iterator[str]:
    yield from (f"--etcd-servers={etcd}", f"--secure-port={port}", "--bind-address=127.0.0.1")
    yield from (f"--cert-dir={folder}/certificates", f"--token-auth-file={folder}/tokens.csv")
    yield from ("--authorization-mode=AlwaysAllow", "--service-cluster-ip-range=10.0.0.0/24")
    yield from (
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        "--feature-gates=TTLAfterFinished=true",
    )
    yield from ("--service-account-issuer=https://test", f"--service-account-signing-key-file={folder}/accounts.pem")
    yield f"--service-account-key-file={folder}/accounts.pem"


def _write_keys(folder: Path, port: int) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    plain, form = serialization.NoEncryption(), serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "accounts.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    (folder / "tokens.csv").write_text(f"{TOKEN},tester,1,system:masters\n")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "tester", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "tester"}}],
        "current-context": "test",
    }
    (folder / "config").write_text(json.dumps(config))
    places = {"kubectl": str(TOOLS / "kubectl"), "config": folder / "config", "pods": str(folder / "pods")}
    wrapper = folder / "bin" / "kubectl"
    wrapper.write_text(EXEC.format(python=netns.PYTHON, **places))
    wrapper.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, here."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found
