"""Real faults of real hosts in namespaces: each is found, and named as the first thing to fix."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.doctor.between import PORTS
from tests.hetctl.discovery.test_discover_hosts import Run, hetctl
from tests.rigs import netns
from tests.rigs.dress import Costume, Dress, dress_host

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def interpreter(folder: Path, torch: str) -> Path:
    """A Python that claims to have this torch: its version file is all that a check-up reads."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    kind = "hip" if "rocm" in torch else "cuda"
    (packages / "torch" / "version.py").write_text(f"__version__ = '{torch}'\n{kind}: str = '6.4'\n")
    return folder / "bin" / "python"


OWN_ADDRESS = r"""$(ip -o -4 addr show eth0 | sed "s/.*inet \([0-9.]*\).*/\1/")"""
# limits cannot be raised here: the well-kept hosts claim theirs, the ill one shows what it really has
UNLIMITED = 's/plain_limit(v) for v in resource.getrlimit(kind)/"unlimited" for v in (0, 1)/'
RENAME = """[ "$RENAMED" ] || exec env RENAMED=1 unshare -u sh -c 'hostname "@NAME@"; exec "$0" "$@"' "$0" "$@\""""


def wrapper(
    python: Path, *, name: str = OWN_ADDRESS, before: str = "", edit: str = "", dress: Dress | None = None
) -> str:
    """A `python3` that starts this Python after shell lines `before`, the probe's program changed by a sed `edit`.

    Hosts of one machine share its name: each gets one of its own that resolves, its address.
    """
    if dress is not None:
        edit += f'; s|"root": ""|"root": "{dress.root}"|; s|"path": ""|"path": "{dress.tools}"|'
    lines = [
        "#!/bin/sh",
        RENAME.replace("@NAME@", name),
        before,
        f'[ "$2" = - ] || exec {python} "$@"',
    ]
    return "\n".join([*lines, f"sed '{edit.strip('; ')}' | exec {python} -I -", ""])


class Plain:
    """Four hosts with two networks, whose first three wrappers and links can be broken and mended."""

    def __init__(self, rig: netns.Rig, folder: Path, python: Path) -> None:
        self.rig, self.folder, self.python = rig, folder, python
        self.names = [host.name for host in rig.hosts]

    def doctor(self, *words: str) -> Run:
        return hetctl(self.rig, self.folder, "doctor", *self.names, *words, "--timeout", "30")

    def use(self, number: int, script: str) -> None:
        (self.rig.hosts[number].folder / "bin" / "python3").write_text(script)

    def mend(self, number: int) -> None:
        self.use(number, wrapper(self.python))

    def ip(self, number: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self.rig.hosts[number].namespace, *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain")
    python = interpreter(folder / "venv", "2.13.0+cpu")
    specs = [netns.HostSpec(tools={"python3": wrapper(python)}) for _ in range(4)]
    with netns.hosts(specs, folder, rails=1, rate="50mbit") as rig:
        yield Plain(rig, folder, python)


def first(run: Run) -> tuple[str, str]:
    return run.document["first"]["check"], run.document["first"]["host"]


def failed(run: Run) -> set[str]:
    return {f["check"] for f in run.document["findings"] if f["state"] == "fail"}


def test_nothing_is_wrong_with_four_plain_hosts(plain: Plain) -> None:
    run = plain.doctor("--level", "pairs", "--skip", "perf", "-o", "lists")
    assert failed(run) == set(), run.document["first"]
    assert run.exit_code in (0, 3), run.stderr
    assert (plain.folder / "lists" / "passing.txt").read_text().split() == plain.names
    reached = [f for f in run.document["findings"] if f["check"] == "ssh.peer"]
    assert [f["state"] for f in reached] == ["ok"] * 4


def test_a_wrong_mtu_on_one_link(plain: Plain) -> None:
    plain.ip(2, "link", "set", "rail0", "mtu", "1400")
    try:
        run = plain.doctor()
    finally:
        plain.ip(2, "link", "set", "rail0", "mtu", "1500")
    assert (run.exit_code, failed(run)) == (1, {"net.mtu"})
    assert first(run) == ("net.mtu", plain.names[2])
    assert "dev rail0 mtu 1500" in run.document["first"]["fix"]


def test_two_interfaces_on_one_subnet(plain: Plain) -> None:
    other = plain.rig.hosts[1].address.rpartition(".")[0] + ".77/24"
    plain.ip(1, "addr", "add", other, "dev", "rail0")
    plain.ip(1, "addr", "del", f"{plain.rig.hosts[1].rails[0]}/24", "dev", "rail0")
    try:
        run = plain.doctor()
    finally:
        plain.ip(1, "addr", "del", other, "dev", "rail0")
        plain.ip(1, "addr", "add", f"{plain.rig.hosts[1].rails[0]}/24", "dev", "rail0")
    assert failed(run) == {"net.subnet"}
    assert first(run) == ("net.subnet", plain.names[1])


def test_a_host_name_that_resolves_to_loopback(plain: Plain) -> None:
    plain.use(3, wrapper(plain.python, name="localhost"))
    try:
        run = plain.doctor()
    finally:
        plain.mend(3)
    assert failed(run) == set()  # ranks are told their interface, and never ask for the name
    warned = [f["host"] for f in run.document["findings"] if (f["check"], f["state"]) == ("host.name", "warn")]
    assert warned == [plain.names[3]]


def test_a_clock_that_is_an_hour_off(plain: Plain) -> None:
    plain.use(0, wrapper(plain.python, edit="s/time\\.time()/(time.time()+3660)/g"))
    try:
        run = plain.doctor("--skip", "host.disk")
    finally:
        plain.mend(0)
    assert failed(run) == {"host.clock"}
    assert first(run) == ("host.clock", plain.names[0])
    assert "1h0" in run.document["first"]["reason"]


def test_a_checkpoint_folder_that_is_mounted_read_only(plain: Plain) -> None:
    checkpoints = plain.folder / "checkpoints"
    checkpoints.mkdir()
    sshd = str(min(plain.rig.hosts[2].pids()))
    inside = ["nsenter", "-t", sshd, "-m", "mount", "-t", "tmpfs", "-o", "ro", "none", str(checkpoints)]
    subprocess.run(inside, check=True, capture_output=True)
    run = plain.doctor("--folder", str(checkpoints))
    subprocess.run(["nsenter", "-t", sshd, "-m", "umount", str(checkpoints)], check=True, capture_output=True)
    assert failed(run) == {"host.disk"}
    assert first(run) == ("host.disk", plain.names[2])
    assert "Read-only" in run.document["first"]["reason"]
    assert not list(checkpoints.iterdir())


def test_an_interpreter_that_is_not_there(plain: Plain) -> None:
    lines = "".join(
        f"  {name}: {{python: {'/nowhere/python3' if i == 1 else 'python3'}}}\n" for i, name in enumerate(plain.names)
    )
    (plain.folder / "inventory.yaml").write_text(f"hosts:\n{lines}")
    run = hetctl(plain.rig, plain.folder, "doctor", "-i", "inventory.yaml", "--timeout", "30")
    (plain.folder / "inventory.yaml").unlink()
    assert (run.exit_code, failed(run)) == (1, {"sw.interpreter"})
    assert first(run) == ("sw.interpreter", plain.names[1])


def test_ports_that_are_closed(plain: Plain) -> None:
    """Routing rules of the host refuse what comes for the ports of runs, as a firewall would."""
    span = f"{PORTS[0]}-{PORTS[1]}"
    plain.ip(1, "rule", "add", "pref", "100", "lookup", "local")
    plain.ip(1, "rule", "del", "pref", "0")
    plain.ip(1, "rule", "add", "pref", "1", "iif", "eth0", "ipproto", "tcp", "dport", span, "prohibit")
    plain.ip(1, "rule", "add", "pref", "2", "iif", "rail0", "ipproto", "tcp", "dport", span, "prohibit")
    try:
        run = plain.doctor("--level", "pairs", "--skip", "perf")
    finally:
        for pref in ("1", "2"):
            plain.ip(1, "rule", "del", "pref", pref)
        plain.ip(1, "rule", "add", "pref", "0", "lookup", "local")
        plain.ip(1, "rule", "del", "pref", "100")
    assert failed(run) == {"net.firewall"}
    assert first(run) == ("net.firewall", plain.names[1])
    assert span.replace("-", ":") in run.document["first"]["fix"]


def test_a_rail_at_a_tenth_of_its_peers_rate(plain: Plain) -> None:
    space = plain.rig.hosts[3].namespace
    shape = ["tc", "-n", space, "qdisc", "replace", "dev", "rail0", "root", "tbf", "rate", "{}", "burst", "256kb"]
    slow, usual = ([w.format(rate) for w in shape] + ["latency", "50ms"] for rate in ("5mbit", "50mbit"))
    subprocess.run(slow, check=True, capture_output=True)
    try:
        for _ in range(4):  # on a busy machine other rails may be as slow for a second, which no host explains
            run = plain.doctor("--only", "ssh.reach,perf.pair")
            if first(run) == ("perf.pair", plain.names[3]):
                break
    finally:
        subprocess.run(usual, check=True, capture_output=True)
    assert failed(run) == {"perf.pair"}
    assert first(run) == ("perf.pair", plain.names[3])
    assert "rail0" in run.document["first"]["reason"]


def test_folders_are_told_from_shared_ones(plain: Plain) -> None:
    run = plain.doctor("--folder", str(plain.folder), "--only", "host.sharedfs")
    assert [f["state"] for f in run.document["findings"]] == ["ok"] * 4
    assert not list(plain.folder.glob(".hetctl*"))


@pytest.fixture(scope="module")
def dressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """Two NVIDIA hosts on InfiniBand and one AMD host on RoCE."""
    folder = tmp_path_factory.mktemp("dressed")
    pythons = {v: interpreter(folder / v, f"2.13.0+{v}") for v in ("cu128", "rocm6.4")}
    specs = []
    for number in range(3):
        costume = Costume(
            f"n{number}", number, gpus=2, nics=2, tool_delay_s=0.0, management={"eno1": f"192.168.0.{number + 1}"}
        )
        if number == 2:
            costume = Costume(
                "n2", 2, "amd", gpus=2, nics=2, fabric="roce", nic_driver="bnxt_en", tool_delay_s=0.0,
                management={"eno1": "192.168.0.3"},
            )  # fmt: skip
        dress = dress_host(folder / f"dress{number}", costume)
        python = pythons["rocm6.4" if number == 2 else "cu128"]
        specs.append(
            netns.HostSpec(
                tools={"python3": wrapper(python, name=f"192.168.0.{number + 1}", edit=UNLIMITED, dress=dress)}
            )
        )
    with netns.hosts(specs, folder) as rig:
        yield Plain(rig, folder, pythons["cu128"])


QUIET = ("--skip", "gpu,host.shm,roce,rdma.counters")


def test_memory_that_may_not_be_pinned(dressed: Plain) -> None:
    script = dressed.rig.hosts[1].folder / "bin" / "python3"
    healthy = script.read_text()
    script.write_text(healthy.replace(UNLIMITED, "s/ / /"))
    try:
        run = dressed.doctor(*QUIET)
    finally:
        script.write_text(healthy)
    assert failed(run) == {"lim.memlock"}, [f for f in run.document["findings"] if f["state"] == "fail"]
    assert first(run) == ("lim.memlock", dressed.names[1])
    assert "may pin" in run.document["first"]["reason"]


def test_a_torch_that_differs_across_the_bridge(dressed: Plain) -> None:
    [version] = dressed.folder.glob("rocm6.4/lib/python*/site-packages/torch/version.py")
    healthy = version.read_text()
    version.write_text(healthy.replace("2.13.0", "2.12.1"))
    try:
        run = dressed.doctor("--only", "sw")
    finally:
        version.write_text(healthy)
    assert (run.exit_code, failed(run)) == (0, set())
    assert first(run)[0] == "sw.match"
    assert "across the bridge" in run.document["first"]["reason"]
