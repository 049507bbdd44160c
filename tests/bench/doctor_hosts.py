"""How long `hetctl doctor` takes on many hosts at its quick level, beside plain `ssh host true` on the same ones.

    python -m tests.bench.doctor_hosts [--hosts 64] [--rounds 3] [--tool-delay 0.5]

The hosts are those of `tests.bench.discover_hosts`: namespaces with a real sshd each, dressed as servers of eight GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.bench.discover_hosts import arguments, dressed_hosts, plain_ssh
from tests.rigs import netns
from tests.rigs.cluster import command, environment


def main() -> None:
    asked = arguments(__doc__)
    with dressed_hosts(asked) as (rig, folder):
        rounds = [(plain_ssh(rig), doctor(rig, folder)) for _ in range(asked.rounds)]
    ssh, ours = (statistics.median(row[i] for row in rounds) for i in (0, 1))
    shown = [{"plain_ssh_s": round(a, 2), "doctor_s": round(b, 2)} for a, b in rounds]
    cores = len(os.sched_getaffinity(0))
    document = {"hosts": asked.hosts, "cores": cores, "doctor_s": round(ours, 2), "ratio": round(ours / ssh, 2)}
    print(json.dumps({**document, "rounds": shown}, indent=2))


def doctor(rig: netns.Rig, folder: Path) -> float:
    """Seconds of `hetctl doctor` on all hosts, its own start included; every host must have been asked."""
    begin = time.perf_counter()
    words = command("doctor", "--json", "--timeout", "60", *[host.name for host in rig.hosts])
    done = subprocess.run(words, cwd=folder, env=environment(rig), capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    found: dict[str, Any] = json.loads(done.stdout)
    reached = {f["host"] for f in found["findings"] if f["check"] == "sw.interpreter" and f["state"] != "unknown"}
    assert len(reached) == len(rig.hosts), f"only {len(reached)} hosts were examined"
    return seconds


if __name__ == "__main__":
    main()
