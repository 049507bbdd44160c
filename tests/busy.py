"""How busy this machine is, for bounds on seconds: what they say holds on a quiet one, elsewhere for as much longer."""

import os
from pathlib import Path


def busy() -> float:
    """Threads that want to run now or wanted to in the last minute, for each core; 1 on a quiet machine."""
    lately, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    wanting = max(float(lately), float(now.partition("/")[0]))
    return max(1.0, wanting / len(os.sched_getaffinity(0)))
