"""How long `hetctl discover` takes on many hosts beside plain `ssh host true` on the same ones, as a ratio in one run.

    python -m tests.bench.discover_hosts [--hosts 64] [--rounds 3] [--tool-delay 0.5]

Hosts are network namespaces with a real sshd each, half dressed as NVIDIA and half as AMD servers of eight GPUs, whose
recorded tools answer as slowly as the real ones. Needs root; everything runs on this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rigs import netns
from tests.rigs.dress import Costume, dress_host

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    asked = arguments(__doc__)
    with dressed_hosts(asked) as (rig, folder):
        rounds = [(plain_ssh(rig), *discover(rig, folder)) for _ in range(asked.rounds)]
    report(asked.hosts, asked.tool_delay, rounds)


def arguments(about: str | None) -> argparse.Namespace:
    """How many hosts and rounds, and how slow tools are."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tool-delay", type=float, default=0.5)
    return parser.parse_args()


@contextlib.contextmanager
def dressed_hosts(asked: argparse.Namespace) -> Iterator[tuple[netns.Rig, Path]]:
    """The hosts, and a folder to work in; ends the program aloud where there can be none."""
    why_not = netns.unavailable()
    if why_not:
        sys.exit(f"skipped: {why_not}")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # the fake roots are tens of thousands of files
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        with netns.hosts([_spec(folder, n, asked.tool_delay) for n in range(asked.hosts)], folder) as rig:
            yield rig, folder


def plain_ssh(rig: netns.Rig) -> float:
    """Seconds of `ssh host true` on all hosts at once."""
    begin = time.perf_counter()
    base = ["ssh", "-F", str(rig.config)]
    running = [subprocess.Popen([*base, h.name, "true"], stdin=subprocess.DEVNULL) for h in rig.hosts]
    codes = [process.wait() for process in running]
    assert not any(codes), f"{sum(map(bool, codes))} of {len(codes)} plain ssh failed"
    return time.perf_counter() - begin


def discover(rig: netns.Rig, folder: Path) -> tuple[float, int]:
    """Seconds and peak memory (bytes) of `hetctl discover` on all hosts, its own start included."""
    environment = {**os.environ, "HOME": str(rig.home), "PYTHONPATH": str(ROOT), "SSH_AUTH_SOCK": ""}
    words = [sys.executable, "-m", "hetctl", "discover", "--json", *[host.name for host in rig.hosts]]
    output = folder / "out.json"
    begin = time.perf_counter()
    with output.open("wb") as file:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    assert os.waitstatus_to_exitcode(status) == 0, "discover failed"
    found = json.loads(output.read_text())
    assert [len(host["devices"]) for host in found["hosts"]] == [8] * len(rig.hosts), "a host is incomplete"
    return seconds, usage.ru_maxrss * 1024


def report(hosts: int, delay: float, rounds: Sequence[tuple[float, float, int]]) -> None:
    """One JSON document: medians, every round, and the ratio."""
    ssh = statistics.median(row[0] for row in rounds)
    ours = statistics.median(row[1] for row in rounds)
    document = {
        "hosts": hosts,
        "cores": len(os.sched_getaffinity(0)),
        "tool_delay_s": delay,
        "plain_ssh_s": round(ssh, 3),
        "discover_s": round(ours, 3),
        "ratio": round(ours / ssh, 3),
        "peak_memory_mib": round(max(row[2] for row in rounds) / 2**20, 1),
        "rounds": [{"plain_ssh_s": round(a, 3), "discover_s": round(b, 3)} for a, b, _ in rounds],
    }
    print(json.dumps(document, indent=2))


def _spec(folder: Path, number: int, delay: float) -> netns.HostSpec:
    amd = number % 2 == 1
    costume = Costume(
        name=f"node{number:03}",
        number=number,
        vendor="amd" if amd else "nvidia",
        fabric="roce" if amd else "infiniband",
        nic_driver="bnxt_en" if amd else "mlx5_core",
        management={"eno1": f"192.168.0.{number + 1}"},
        tool_delay_s=delay,
    )
    return netns.HostSpec(tools={"python3": netns.dressed_python(dress_host(folder / f"dress{number}", costume))})


if __name__ == "__main__":
    main()
