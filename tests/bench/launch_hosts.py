"""From `hetctl run` to the first rank's first line on many hosts, beside parallel ssh that only imports torch.

    python -m tests.bench.launch_hosts [--hosts 8] [--rounds 3]

Hosts are network namespaces with a real sshd each, on this machine's cores. Needs root. Interleaved, as a ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

PROGRAM = "import torch, os; print('FIRST', os.environ['RANK'], flush=True)\n"


def plain(rig: netns.Rig) -> float:
    """Seconds until the first host's and until all hosts' torch is imported: returns the first."""
    begin = time.perf_counter()
    argv = ["ssh", "-F", str(rig.config)]
    env = {**os.environ, "HOME": str(rig.home)}
    program = f"{sys.executable} -c 'import torch; print(1, flush=True)'"
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*argv, h.name, program], env=env, stdout=pipe, text=True) for h in rig.hosts]
    for process in started:
        assert process.wait(120) == 0
    return time.perf_counter() - begin


def ours(rig: netns.Rig, folder: Path, name: str) -> tuple[float, float]:
    """Seconds until a rank's first line, and until every rank's."""
    begin = time.perf_counter()
    argv = command("run", "--cluster", "cluster.yaml", "--run-dir", name, "--", "python", "program/first.py")
    process = subprocess.Popen(argv, cwd=folder, env=environment(rig), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    times = [time.perf_counter() - begin for line in process.stdout if "FIRST" in line]
    assert process.wait(120) == 0
    assert len(times) == len(rig.hosts)
    return times[0], times[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lb") as text:
        folder = Path(text) / "mine"
        (folder / "program").mkdir(parents=True)
        (folder / "program" / "first.py").write_text(PROGRAM)
        specs = [netns.HostSpec(hide=(str(folder),)) for _ in range(options.hosts)]
        with netns.hosts(specs, Path(text), rails=1) as rig:
            half = options.hosts // 2
            islands = {"h200": [(n, 1) for n in range(half)], "mi325x": [(n, 1) for n in range(half, options.hosts)]}
            write_cluster(rig, islands, folder / "cluster.yaml")
            cold = ours(rig, folder, "cold")
            print(f"first run, code shipped: first line {cold[0]:.2f} s, all {cold[1]:.2f} s")
            firsts, alls = [], []
            for number in range(options.rounds):
                base, (first, last) = plain(rig), ours(rig, folder, f"warm{number}")
                firsts.append(first / base)
                alls.append(last / base)
                print(f"ssh import torch {base:.2f} s; hetctl first {first:.2f} s, all {last:.2f} s")
    print(
        f"ratio to plain ssh (all hosts): first line {statistics.median(firsts):.2f}, all {statistics.median(alls):.2f}"
    )


if __name__ == "__main__":
    main()
