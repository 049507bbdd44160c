"""Discovery of real hosts: twelve namespaces with an sshd each, eight dressed as GPU servers, four that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.cluster import load_cluster
from tests.busy import busy
from tests.rigs import netns
from tests.rigs.dress import Costume, dress_host

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 12.0
OLD_PYTHON = f"""#!/bin/sh
exec {netns.PYTHON} -I -c 'import sys; sys.version_info = (3, 6, 9); exec(compile(sys.stdin.read(), "x", "exec"))'
"""
TRAP = "#!/bin/sh\nexec sleep 600\n"


@dataclass(frozen=True)
class Run:
    """One run of the command line: its exit code, its document, and how long it took."""

    rig: netns.Rig
    folder: Path
    exit_code: int
    document: dict[str, Any]
    stderr: str
    seconds: float
    busy: float  # the machine, when it began: the load may have gone by the time that a test looks

    def host(self, number: int) -> dict[str, Any]:
        name = self.rig.hosts[number].name
        return next(h for h in self.document["hosts"] if h["name"] == name)


def hetctl(rig: netns.Rig, folder: Path, *words: str, env: dict[str, str] | None = None) -> Run:
    """`hetctl ... --json` as the person whose home is the rig's."""
    begin, load = time.monotonic(), busy()
    done = subprocess.run(
        [sys.executable, "-m", "hetctl", *words, "--json"],
        cwd=folder,
        env={**os.environ, "HOME": str(rig.home), "PYTHONPATH": str(ROOT), "SSH_AUTH_SOCK": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=400,
    )
    document = json.loads(done.stdout) if done.stdout.strip() else {}
    return Run(rig, folder, done.returncode, document, done.stderr, time.monotonic() - begin, load)


def costume(number: int) -> Costume:
    """Hosts 0 to 3 are NVIDIA on InfiniBand, 4 to 7 AMD on RoCE; all have a plain management network."""
    management = {"eno1": f"192.168.0.{number + 1}"}
    if number < 4:
        return Costume(f"green{number}", number, management=management)
    return Costume(f"red{number}", number, vendor="amd", fabric="roce", nic_driver="bnxt_en", management=management)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("rig")
    dresses = [dress_host(folder / f"dress{n}", costume(n)) for n in range(8)]
    specs = [netns.HostSpec(tools={"python3": netns.dressed_python(dress)}) for dress in dresses]
    specs[7] = netns.HostSpec(tools=specs[7].tools, behind=0)  # only host 0 can reach it: the config says ProxyJump
    specs += [
        netns.HostSpec(sshd=False),
        netns.HostSpec(tools={"python3": TRAP}),
        netns.HostSpec(other_key=True),
        netns.HostSpec(tools={"python3": OLD_PYTHON}),
    ]
    with netns.hosts(specs, folder) as rig:
        names = [host.name for host in rig.hosts]
        yield hetctl(rig, folder, "discover", *names, "--timeout", str(TIMEOUT_S), "--capture", "out.tgz")


def test_every_failure_is_named_and_the_rest_is_complete(run: Run) -> None:
    assert run.exit_code == 4, run.stderr
    assert [run.host(n)["status"] for n in range(12)] == ["ok"] * 8 + [
        "connection-refused",
        "timeout",
        "host-key-changed",
        "python-unsupported",
    ]
    assert all(len(run.host(n)["devices"]) == 8 for n in range(8))
    assert "3.6.9" in run.host(11)["reason"]
    assert "waiting for python3" in run.host(9)["reason"]


def test_it_is_over_soon_after_the_deadline(run: Run) -> None:
    assert TIMEOUT_S <= run.seconds < TIMEOUT_S + 12 * max(run.busy, busy())


def test_the_cluster_file_says_what_the_document_says(run: Run) -> None:
    cluster = load_cluster(run.folder / "cluster.yaml")
    assert cluster.digest == run.document["digest"]
    assert {i.vendor: len(i.members) for i in cluster.islands} == {"nvidia": 32, "amd": 32}
    kinds = {n.name: n.kind for n in cluster.networks}
    assert {i.vendor: kinds[i.fabric] for i in cluster.islands} == {"nvidia": "infiniband", "amd": "roce"}
    assert {i.name for i in cluster.islands} == {"h200", "mi325x"}


def test_islands_of_two_vendors_talk_over_what_they_share(run: Run) -> None:
    cluster = load_cluster(run.folder / "cluster.yaml")
    link = cluster.link("h200", "mi325x")
    assert link is not None
    ways = {way.kind: way for way in link.transports}
    assert ways["tcp"].usable
    assert "192.168.0.0/24" in ways["tcp"].reason
    assert not ways["rdma"].usable
    assert "holds all their hosts" in ways["rdma"].reason


def test_each_gpu_has_a_rail_of_its_own(run: Run) -> None:
    for host in load_cluster(run.folder / "cluster.yaml").hosts[:8]:
        rails = [nic for device in host.devices for nic in device.nics]
        assert len(set(rails)) == len(rails) == 8


def test_a_capture_is_discovered_again_with_masked_names(run: Run) -> None:
    again = hetctl(run.rig, run.folder, "discover", "--from-capture", "out.tgz", "-o", "again.yaml")
    assert again.exit_code == 4
    assert [h["status"] for h in again.document["hosts"]] == [h["status"] for h in run.document["hosts"]]
    assert [len(h["devices"]) for h in again.document["hosts"]] == [len(h["devices"]) for h in run.document["hosts"]]
    text = (run.folder / "again.yaml").read_text()
    assert not [host.name for host in run.rig.hosts if host.name in text]


def test_the_same_hosts_from_an_inventory_by_address(run: Run) -> None:
    jump, behind = run.rig.hosts[0], run.rig.hosts[7]
    (run.folder / "inv").mkdir()
    (run.folder / "inv" / "inventory.yaml").write_text(
        f"""
defaults: {{user: root, identity_file: {run.rig.home}/.ssh/id_ed25519}}
hosts:
  first: {{address: {jump.address}, data_address: 10.9.9.9, gpus: [0, 1], exclude_nics: [eno1]}}
  tucked: {{address: {behind.address}, proxy_jump: "root@{jump.address}:22"}}
"""
    )
    found = hetctl(run.rig, run.folder / "inv", "discover", "--timeout", str(TIMEOUT_S))
    assert found.exit_code == 0, found.stderr
    assert "inventory.yaml" in found.stderr
    first, tucked = found.document["hosts"]
    assert (len(first["devices"]), len(tucked["devices"])) == (2, 8)
    assert first["data_address"] == "10.9.9.9"
    assert "eno1" not in [nic["name"] for nic in first["nics"]]


def test_trust_pins_what_is_new_and_refuses_what_changed(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    rig = netns.Rig(run.rig.hosts, home)
    changed = run.rig.hosts[10].address
    other = (run.folder / "other.pub").read_text().rsplit(" ", 1)[0]
    (home / ".ssh" / "known_hosts").write_text(f"{changed} {other}")
    fresh = run.rig.hosts[1].address
    before = hetctl(rig, tmp_path, "discover", fresh, "-o", "x.yaml")
    assert before.document["hosts"][0]["status"] == "unknown-host-key"
    assert "hetctl hosts trust" in before.stderr
    trusted = hetctl(rig, tmp_path, "hosts", "trust", "--yes", fresh, changed)
    assert trusted.exit_code == 4
    shown = {h["name"]: h for h in trusted.document["hosts"]}
    assert shown[fresh]["pinned"]
    assert "CHANGED" in shown[changed]["problem"]
    fingerprint = subprocess.run(["ssh-keygen", "-lf", run.folder / "host.pub"], capture_output=True, text=True).stdout
    assert shown[fresh]["keys"][0]["fingerprint"] in fingerprint
    lines = (home / ".ssh" / "known_hosts").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [changed, fresh]
    after = hetctl(rig, tmp_path, "discover", fresh, "-o", "x.yaml")
    assert after.document["hosts"][0]["status"] == "authentication-failed"


def test_a_key_of_the_agent_lets_us_in(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text(run.rig.known_hosts.read_text())
    rig, host = netns.Rig(run.rig.hosts, home), run.rig.hosts[2].address
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        env = {"SSH_AUTH_SOCK": str(socket)}
        end = time.monotonic() + 60  # its socket lies there before it listens: 2 says that nobody answers
        while subprocess.run(["ssh-add", "-l"], env={**os.environ, **env}).returncode == 2 and time.monotonic() < end:
            time.sleep(0.01)
        key = run.rig.home / ".ssh" / "id_ed25519"
        subprocess.run(["ssh-add", "-q", str(key)], env={**os.environ, **env}, check=True)
        found = hetctl(rig, tmp_path, "discover", host, "-o", "x.yaml", env=env)
        assert found.document["hosts"][0]["status"] == "ok", found.stderr
    finally:
        agent.terminate()
        agent.wait()


def test_nobody_is_trusted_without_an_answer(run: Run, tmp_path: Path) -> None:
    rig = netns.Rig(run.rig.hosts, tmp_path)
    asked = hetctl(rig, tmp_path, "hosts", "trust", run.rig.hosts[1].address)
    assert asked.exit_code != 0
    assert not (tmp_path / ".ssh" / "known_hosts").exists()


def test_links_are_measured_over_ssh(tmp_path: Path) -> None:
    with netns.hosts(2, tmp_path, rails=1, rate="200mbit") as rig:
        names = [host.name for host in rig.hosts]
        found = hetctl(rig, tmp_path, "discover", "--links", *names)
        assert found.exit_code == 0, found.stderr
        rows = {tuple(row["nics"]): row for row in found.document["measured"]}
        assert 15e6 < rows["rail0", "rail0"]["rate_bytes_per_s"] < 26e6
        assert rows["eth0", "eth0"]["rate_bytes_per_s"] > 2 * rows["rail0", "rail0"]["rate_bytes_per_s"]
        assert 0 < rows["eth0", "eth0"]["latency_s"] < 0.1
        assert not [row for row in rows.values() if row["problem"]]
        again = hetctl(rig, tmp_path, "bench", "links", "-o", "measured.yaml")
        assert again.exit_code == 0, again.stderr
        assert {tuple(row["nics"]) for row in again.document["measured"]} == rows.keys()
        assert "rail0" in (tmp_path / "measured.yaml").read_text()
