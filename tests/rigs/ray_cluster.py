"""A real Ray cluster over the namespaced hosts of a rig: its head here, without a core, a raylet in each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs import netns

RAY = Path(sys.executable).with_name("ray")
QUIET = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
STORE_BYTES = 80_000_000
PATIENCE_S = 400  # a raylet starts a dozen processes, beside those of other tests


def unavailable() -> str:
    """Why there is no Ray cluster here, '' where there is."""
    if why := netns.unavailable():
        return why
    return (
        ""
        if importlib.util.find_spec("ray")
        else "Ray's raylets need the package ray: pip install -c constraints.txt ray"
    )


@dataclass
class RaySite:
    """A cluster of Ray, as somebody sees it who is logged in at its head."""

    rig: netns.Rig
    address: str
    temporary: str
    resources: Sequence[Mapping[str, float]]
    raylets: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**QUIET, "RAY_ADDRESS": self.address}

    def start_node(self, number: int) -> None:
        """The raylet of a host, which has two cores in Ray's eyes and the resources of its own."""
        host = self.rig.hosts[number]
        words = [f"--address={self.address}", f"--node-name={host.name}", f"--node-ip-address={host.address}"]
        words += ["--num-cpus=2", f"--resources={json.dumps(self.resources[number])}"]
        # a temporary folder of its own, as on a machine of its own: raylets that share one fall over each other
        begin = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', self.temporary, str(RAY), "start", "--block"]
        enter = ["ip", "netns", "exec", host.namespace, *begin]
        self.raylets[number] = _start([*enter, *words], host.folder, host.folder / "home")

    def kill_node(self, number: int) -> None:
        """Everything that lives on the host, at once."""
        for pid in self.rig.hosts[number].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.raylets.pop(number).wait(30)

    def ask(self, program: str) -> str:
        """What a program prints that is connected to the cluster as `ray`."""
        begin = (  # its head answers before it knows of a node
            f"import ray, time\nend = time.monotonic() + {PATIENCE_S}\nwhile not ray.is_initialized():\n"
            "    try:\n        ray.init(address='auto', logging_level='ERROR', log_to_driver=False)\n"
            "    except ConnectionError:\n        assert time.monotonic() < end\n        time.sleep(0.5)\n"
        )
        environment = {**os.environ, **self.environment}
        argv = [sys.executable, "-c", begin + program]
        done = subprocess.run(argv, env=environment, text=True, capture_output=True, timeout=2 * PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def live(self) -> set[str]:
        """The names of its live nodes."""
        return set(self.ask("print(*(n['NodeName'] for n in ray.nodes() if n['Alive']))").split())

    def await_nodes(self) -> None:
        """Until every raylet is one of its nodes."""
        wanted = {self.rig.hosts[number].name for number in self.raylets}
        program = (
            f"end = time.monotonic() + {PATIENCE_S}\nwanted = {wanted!r}\n"
            "while not wanted <= {n['NodeName'] for n in ray.nodes() if n['Alive']} and time.monotonic() < end:\n"
            "    time.sleep(0.1)\n"
        )
        self.ask(program)
        assert wanted <= self.live()


@contextlib.contextmanager
def ray_cluster(rig: netns.Rig, folder: Path, *, resources: Sequence[Mapping[str, float]]) -> Iterator[RaySite]:
    """Ray on the rig's hosts, with custom resources each, as long as the block lasts."""
    folder.mkdir()
    here = rig.hosts[0].address.rpartition(".")[0] + ".254"
    address, short = (
        f"{here}:{_free_port(here)}",
        tempfile.mkdtemp(prefix="hr", dir="/tmp"),
    )  # its sockets' paths are long
    words = ["--head", f"--port={address.rpartition(':')[2]}", f"--node-ip-address={here}", "--num-cpus=0"]
    words += ["--include-dashboard=false", f"--temp-dir={short}", "--node-name=head"]
    head = _start([str(RAY), "start", "--block", *words], folder, folder)
    site = RaySite(rig, address, short, resources)
    try:
        _await_port(address, head)
        for number in range(len(rig.hosts)):
            site.start_node(number)
        site.await_nodes()
        yield site
    finally:
        for process in (*site.raylets.values(), head):
            process.terminate()
        for process in (*site.raylets.values(), head):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


def _start(argv: list[str], folder: Path, home: Path) -> subprocess.Popen[bytes]:
    argv = [*argv, f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "RAY_"))}
    with (folder / "ray.out").open("ab") as out:
        env = {**inherited, **QUIET, "HOME": str(home)}
        return subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True)


def _await_port(address: str, head: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            assert head.poll() is None
            time.sleep(0.05)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as held:
        return int(held.getsockname()[1])
