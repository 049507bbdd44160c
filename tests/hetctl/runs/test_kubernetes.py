"""hetctl under a real Kubernetes control plane, on nodes that have no SSH server; kubelets and `exec` are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetctl.comm.contract.cluster import load_cluster
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, write_cluster
from tests.rigs.kubernetes import BAD_IMAGE, GREEN, PODS, RED, NodeSpec, Site, as_pods, kubernetes, unavailable

WHY_NOT = unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ISLANDS = {"h200": ((0, 1), (1, 1)), "mi325x": ((2, 1),)}
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "optimizer.warmup_steps=2", "checkpoint.every=5")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with (
        netns.hosts([netns.HostSpec(sshd=False)] * 4, folder / "rig") as rig,
        kubernetes(rig, [GREEN, GREEN, RED, NodeSpec()], folder / "kubernetes") as site,
    ):
        write_cluster(rig, ISLANDS, mine / "cluster.yaml")
        as_pods(mine / "cluster.yaml", PODS)
        yield site


def argv(site: Site, *words: str) -> tuple[list[str], dict[str, str]]:
    return command(*words), environment(site.rig, **site.environment)


def hetctl(site: Site, mine: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    line, env = argv(site, *words)
    return subprocess.run(line, cwd=mine, env={**env, **more}, text=True, capture_output=True, timeout=400)


def train_words(run: str, *words: str, steps: int = 20) -> list[str]:
    settings = [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]
    return ["train", "--cluster", "cluster.yaml", "--run-dir", run, *settings, *words]


def train(site: Site, mine: Path, run: str, *words: str, steps: int = 20) -> subprocess.CompletedProcess[str]:
    return hetctl(site, mine, *train_words(run, *words, steps=steps))


def begun(site: Site, mine: Path, run: str, *words: str, steps: int) -> subprocess.Popen[str]:
    """A run that makes steps, and that nobody waits for."""
    line, env = argv(site, *train_words(run, *words, steps=steps))
    process = subprocess.Popen(
        line, cwd=mine, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    site.until(lambda: process.poll() is not None or steps_made(mine, run) > 6)
    assert process.poll() is None, process.communicate()
    return process


def steps_made(mine: Path, run: str) -> int:
    file = mine / run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def nothing_left(site: Site) -> bool:
    return not site.names() and not [p for h in site.rig.hosts for p in h.pids() if "hetctl" in _words(p)]


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def alone(site: Site, mine: Path) -> list[float]:
    """The losses of the same plan's 20 steps on this machine."""
    settings = [w for key in (*SETTINGS, "train.steps=20") for w in ("--set", key)]
    plan = hetctl(site, mine, "plan", "--model", "demo", "--cluster", "cluster.yaml", "-o", "plan.yaml", *settings)
    assert plan.returncode == 0, plan.stderr
    done = hetctl(site, mine, "train", "--plan", "plan.yaml", "--run-dir", "alone", *settings)
    assert done.returncode == 0, done.stderr
    return losses(mine / "alone")


def test_two_islands_train_in_pods_and_leave_nothing(site: Site, mine: Path, alone: list[float]) -> None:
    done = train(site, mine, "both")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(mine / "both") == pytest.approx(alone, rel=1e-5)
    assert nothing_left(site)
    assert json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"] == []


@pytest.mark.slow
def test_any_program_runs_in_pods(site: Site, mine: Path) -> None:
    (mine / "here.py").write_text(
        'import os, socket; print("rank", os.environ["RANK"], os.getpid() < 1000, flush=True)\n'
    )
    done = hetctl(site, mine, "run", "--cluster", "cluster.yaml", "--run-dir", "program", "--", "python", "here.py")
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split("] ", 1)[1] for line in done.stdout.splitlines() if "] rank " in line}
    assert said == {f"rank {n} True" for n in range(3)}, "a pod has a process table of its own"
    assert nothing_left(site)


@pytest.mark.slow
def test_what_a_run_makes_while_it_lasts(site: Site, mine: Path) -> None:
    run = begun(site, mine, "lasting", steps=5000)
    pods = {p["spec"]["nodeName"]: p for p in site.pods()}
    assert set(pods) == {host.name for host in site.rig.hosts[:3]}
    jobs = {j["metadata"]["name"]: j for j in json.loads(site.kubectl("get", "jobs", "--output=json"))["items"]}
    first, second = sorted(jobs)
    assert [o["name"] for o in jobs[second]["metadata"]["ownerReferences"]] == [first], "one deletion deletes all"
    shown = json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"]
    assert [(r["run"], r["state"]) for r in shown] == [("lasting", "running")]
    assert "step" in hetctl(site, mine, "logs", "lasting").stdout
    stopped = hetctl(site, mine, "stop", "lasting")
    assert stopped.returncode == 0, stopped.stderr
    run.communicate(timeout=60)
    assert nothing_left(site)
    made = steps_made(mine, "lasting")
    again = hetctl(site, mine, "resume", "lasting", "--set", f"train.steps={made + 3}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"continuing from step {made}" in again.stdout
    assert nothing_left(site)


@pytest.mark.slow
def test_interrupted_by_a_person_it_saves_and_leaves_nothing(site: Site, mine: Path) -> None:
    run = begun(site, mine, "interrupted", steps=5000)
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 130, said
    assert json.loads((mine / "interrupted" / "summary.json").read_text())["processes_left"] == 0
    assert nothing_left(site)


@pytest.mark.slow
def test_a_lost_pod_is_named_replaced_and_the_run_goes_on(site: Site, mine: Path) -> None:
    run = begun(site, mine, "lost", "--max-restarts", "2", steps=150)
    victim = next(p["metadata"]["name"] for p in site.pods() if p["spec"]["nodeName"] == site.rig.hosts[2].name)
    site.kubectl("delete", "pod", victim, "--now", "--wait=false")
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert "restart 1 of 2" in said
    assert site.rig.hosts[2].name in said.partition("restart 1 of 2")[2].splitlines()[0], "it is named"
    summary = json.loads((mine / "lost" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("done", 150, 1)
    assert nothing_left(site)


@pytest.mark.slow
def test_what_a_killed_hetctl_leaves_is_cleaned(site: Site, mine: Path) -> None:
    run = begun(site, mine, "killed", steps=5000)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert "lost" in hetctl(site, mine, "ps").stdout
    done = hetctl(site, mine, "clean")
    assert done.returncode == 0, done.stderr
    assert nothing_left(site)
    assert json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"] == []


@pytest.mark.slow
def test_a_run_that_waits_for_its_pods_says_why_and_can_be_stopped(site: Site, mine: Path) -> None:
    (mine / "cluster.yaml").rename(mine / "kept.yaml")
    try:
        write_cluster(site.rig, ISLANDS, mine / "cluster.yaml")
        more = {"h200": replace(PODS["h200"], resources={"nvidia.com/gpu": 9}), "mi325x": PODS["mi325x"]}
        as_pods(mine / "cluster.yaml", more)
        line, env = argv(site, *train_words("waiting"))
        run = subprocess.Popen(line, cwd=mine, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert run.stdout is not None
        said = next(one for one in run.stdout if "Insufficient nvidia.com/gpu" in one)
        assert site.rig.hosts[0].name in said
        stopped = hetctl(site, mine, "stop", "waiting")
        assert stopped.returncode == 0, stopped.stderr
        run.communicate(timeout=60)
        assert nothing_left(site)
    finally:
        (mine / "kept.yaml").rename(mine / "cluster.yaml")


def inventory(site: Site, file: Path, **more: Any) -> None:
    """Names the nodes with devices, and an image for each kind."""
    names = [host.name for host in site.rig.hosts]
    file.write_text(
        yaml.safe_dump(
            {
                "groups": {
                    "green": {"hosts": names[:2], "kubernetes": {"image": "torch:cuda", **more}},
                    "red": {"hosts": names[2:3], "kubernetes": {"image": "torch:rocm"}},
                }
            }
        )
    )


def test_labels_alone_say_which_devices_there_are(site: Site, tmp_path: Path) -> None:
    done = hetctl(site, tmp_path, "discover", "--from", "kubernetes", "-o", "found.yaml", "--json")
    assert done.returncode == 0, done.stderr
    found = load_cluster(tmp_path / "found.yaml")
    seen = {h.name: [(d.device_class, len(h.devices)) for d in h.devices[:1]] for h in found.hosts}
    names = [host.name for host in site.rig.hosts]
    assert seen == {names[0]: [("h200", 8)], names[1]: [("h200", 8)], names[2]: [("mi325x", 4)]}
    assert found.hosts[0].devices[0].memory_bytes == 143771 * 2**20
    access = found.hosts[2].access
    assert access is not None
    assert access.kubernetes is not None
    assert access.kubernetes.resources == {"amd.com/gpu": 4}
    assert access.kubernetes.tolerations == ({"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"},)
    assert "NICs stay unknown" in done.stderr
    for words in (("doctor", "--from", "kubernetes"), ("exec", "--from", "kubernetes", "--", "true")):
        refused = hetctl(site, tmp_path, *words)
        assert refused.returncode == 2, refused.stderr
        assert f"no image is named for {names[0]}, {names[1]}, {names[2]}" in refused.stderr
    refused = hetctl(
        site, tmp_path, "train", "--cluster", "found.yaml", "--skip-checks", "--set", "batch.global_batch=20"
    )
    assert refused.returncode == 2, refused.stderr
    assert "no image is named" in refused.stderr
    assert nothing_left(site)


def test_pods_are_asked_where_images_are_named(site: Site, tmp_path: Path) -> None:
    inventory(site, tmp_path / "inventory.yaml")
    done = hetctl(site, tmp_path, "discover", "--from", "kubernetes", "-o", "found.yaml", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [host["data_address"] for host in document["hosts"]] == [host.address for host in site.rig.hosts[:3]]
    assert document["hosts"][0]["facts"]["system"]["cpu"]["threads"] == os.cpu_count()
    assert document["hosts"][0]["access"]["kubernetes"]["resources"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert nothing_left(site), "pods that were made to be asked are gone"
    ran = hetctl(site, tmp_path, "exec", "green", "--", "hostname", "-I")
    assert site.rig.hosts[1].address in ran.stdout, ran.stderr
    assert nothing_left(site)
    examined = hetctl(site, tmp_path, "doctor", "--from", "kubernetes", "--json")
    findings = json.loads(examined.stdout)["findings"]
    assert {host.name for host in site.rig.hosts[:3]} <= {f["host"] for f in findings}, examined.stderr
    assert nothing_left(site)


def test_an_image_that_cannot_be_pulled_is_named(site: Site, tmp_path: Path) -> None:
    inventory(site, tmp_path / "inventory.yaml", image=BAD_IMAGE)
    done = hetctl(site, tmp_path, "discover", "--from", "kubernetes", "-o", "found.yaml")
    assert done.returncode == 4, done.stderr
    assert f"no such image: {BAD_IMAGE}" in done.stderr
    assert nothing_left(site)


def test_without_kubectl_or_where_it_refuses_one_sentence_says_so(site: Site, tmp_path: Path) -> None:
    bare = hetctl(site, tmp_path, "discover", "--from", "kubernetes", PATH=str(tmp_path))
    assert (bare.returncode, "there is no kubectl here" in bare.stderr) == (2, True), bare.stderr
    inventory(site, tmp_path / "inventory.yaml", context="nowhere")
    (tmp_path / "bad.yaml").write_text((tmp_path / "inventory.yaml").read_text())
    refused = hetctl(site, tmp_path, "discover", "--from", "kubernetes", "-i", "bad.yaml", "green")
    assert refused.returncode != 0
    assert (
        "kubectl refused: Error in configuration: context was not found for specified context: nowhere"
        in refused.stderr
    )
    assert "Traceback" not in bare.stderr + refused.stderr


def test_a_host_that_is_no_node_is_named(site: Site, tmp_path: Path) -> None:
    done = hetctl(site, tmp_path, "discover", "--from", "kubernetes", "nosuchnode")
    assert (done.returncode, "Kubernetes knows no node nosuchnode" in done.stderr) == (2, True), done.stderr
