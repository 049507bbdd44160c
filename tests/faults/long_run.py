"""Whether a long run stays level: what its processes hold while it saves, loses rails and SSH sessions.

    python -m tests.faults.long_run [--minutes 120] [--out FILE]

Two islands of two ranks on two hosts with four networks of their own, on CPUs. After a fifth and two fifths of the time
a rail is cut, between them SSH sessions break off, and every 200 steps a checkpoint is saved. Memory, threads and open
files of each process and the store's keys are noted; the third fifth's median is compared with the last one's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hetctl.comm.contract.cluster import save_cluster
from tests.faults.plant import role_of, sessions_on, words
from tests.rigs import netns
from tests.rigs.cluster import command, environment, with_nics, write_cluster

RAILS = 4
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "checkpoint.every=200", "checkpoint.keep=2")
SETTINGS = (*SETTINGS, "train.steps=100000000")
EVERY_S = 20.0
GROWTH_BYTES, GROWTH = 16 << 20, 0.03  # of a process's memory, both of which are more than what allocators keep back
KEYS = """
import sys, torch.distributed as dist
print(dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False).num_keys())
"""

Held = dict[str, float]  # per figure, of one process or of the store


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="a line of JSON per sample")
    options = parser.parse_args()
    if not netns.ready():
        return 3
    with tempfile.TemporaryDirectory(prefix="hl") as name, netns.hosts(2, Path(name) / "rig", rails=RAILS) as rig:
        samples = watch(rig, Path(name), options.minutes * 60, options.out)
        figures = json.loads((Path(name) / "run" / "summary.json").read_text())
        print(f"{figures['status']} after {figures['steps']} steps, losing {RAILS - 2} rails")
        return report(samples)


def watch(rig: netns.Rig, folder: Path, seconds: float, out: Path | None) -> list[tuple[float, dict[str, Held]]]:
    """A run that is disturbed as the page says, until its time is over; what was held when."""
    cluster = write_cluster(rig, {"h200": ((0, 2),), "mi325x": ((1, 2),)}, folder / "cluster.yaml")
    hosts = tuple(
        with_nics(cluster.host_by_name[h.name], h, reached=range(RAILS), near=lambda d: (d, d + 2)) for h in rig.hosts
    )
    save_cluster(folder / "cluster.yaml", replace(cluster, hosts=hosts))
    settings = [word for key in SETTINGS for word in ("--set", key)]
    argv = command("train", "--cluster", "cluster.yaml", "--run-dir", "run", *settings)
    samples, due = [], disturbances(rig, seconds)
    with (folder / "said").open("wb") as said:
        launcher = subprocess.Popen(argv, cwd=folder, env=environment(rig), stdout=said, stderr=said)
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            while due and due[0][0] <= now:
                due.pop(0)[1]()
            assert launcher.poll() is None, (folder / "said").read_text()[-2000:]
            samples.append((now, held(rig, launcher.pid)))
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(samples[-1]) + "\n")
            time.sleep(EVERY_S)
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)
    return samples


def disturbances(rig: netns.Rig, seconds: float) -> list[tuple[float, Callable[[], Any]]]:
    """What happens when."""
    space = ["ip", "-n", rig.hosts[1].namespace, "link", "set"]

    def cut(rail: int) -> Callable[[], Any]:
        return lambda: subprocess.run([*space, f"rail{rail}", "down"], check=True)

    def break_off() -> None:
        for pid in (p for host in rig.hosts for p in sessions_on(host)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    breaks = [(share * seconds, break_off) for share in (0.3, 0.5, 0.7, 0.9)]
    return sorted([(0.2 * seconds, cut(2)), (0.4 * seconds, cut(3)), *breaks], key=lambda one: one[0])


def held(rig: netns.Rig, launcher: int) -> dict[str, Held]:
    """What each process of the run holds now, and the store."""
    found: dict[str, Held] = {}
    for pid in (launcher, *(p for host in rig.hosts for p in host.pids())):
        role = role_of(pid)
        with contextlib.suppress(psutil.Error):
            if role:
                process = psutil.Process(pid)
                found[f"{role} {pid}"] = {
                    "memory": process.memory_info().rss,
                    "threads": process.num_threads(),
                    "files": process.num_fds(),
                }
            if role == "store":
                found["keys"] = {"keys": keys(rig, words(pid).decode().split("\0"))}
    return found


def keys(rig: netns.Rig, argv: Sequence[str]) -> float:
    host, port = argv[-3:-1]
    space = next(h.namespace for h in rig.hosts if host in (h.address, *h.rails))
    asked = ["ip", "netns", "exec", space, sys.executable, "-c", KEYS, host, port]
    return float(subprocess.run(asked, text=True, capture_output=True, check=True, timeout=120).stdout)


def report(samples: Sequence[tuple[float, dict[str, Held]]]) -> int:
    """A line per process and figure; 1 where one does not stay level."""
    last = samples[-1][0]
    of: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for at, found in samples:
        part = 0 if 0.4 <= at / last < 0.6 else 1 if at / last >= 0.8 else None
        for name, figure, value in ((n, f, v) for n, one in found.items() for f, v in one.items()):
            if part is not None:
                of[name, figure][part].append(value)
    grown = 0
    for (name, figure), (before, after) in of.items():
        if before and after:
            a, b = statistics.median(before), statistics.median(after)
            bad = b - a > max(GROWTH_BYTES, GROWTH * a) if figure == "memory" else b > a
            grown += bad
            print(f"{'BAD' if bad else 'ok '} {name:16} {figure:8} {a:14,.0f} -> {b:14,.0f}")
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
