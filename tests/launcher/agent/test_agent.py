"""An agent by itself: which of its ranks' ends it says it had asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from hetctl.comm.contract.events import document
from hetctl.launcher.agent.orders import Order, Prepare, Start, Stop, WorkerOrder

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def until(events: Iterator[dict[str, Any]], kind: str, rank: int | None = None) -> dict[str, Any]:
    return next(e for e in events if e["event"] == kind and e.get("rank") == rank)


def test_who_is_killed_before_its_time_is_over_was_killed_by_somebody_else(tmp_path: Path) -> None:
    """Its peers may have noticed first, and had all ranks told to end: the one that was killed is why, all the same."""
    workers = tuple(WorkerOrder(r, (sys.executable, "-c", DEAF), log=str(tmp_path / f"{r}.log")) for r in range(3))
    agent = subprocess.Popen(
        [sys.executable, "-m", "hetctl.launcher.agent.agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    events, line = map(json.loads, agent.stdout), agent.stdin

    def order(what: Order) -> None:
        line.write(json.dumps(document(what)) + "\n")
        line.flush()

    order(Prepare(workers, lease_s=60.0))
    until(events, "ready")
    order(Start(0))
    pids = {rank: int(until(events, "started", rank)["pid"]) for rank in range(3)}
    while any(not (tmp_path / f"{r}.log").read_text() for r in range(3)):
        time.sleep(0.01)  # one that is not deaf yet would end as it is asked to
    order(Stop(60.0, failed=True))
    os.kill(pids[1], signal.SIGKILL)
    told = until(events, "exit", 1)
    assert (told["code"], told.get("asked", False)) == (-signal.SIGKILL, False)
    order(Stop(0.0))
    ends = [e for e in takewhile(lambda e: e["event"] != "done", events) if e["event"] == "exit"]
    assert sorted((e["rank"], e["code"], e["asked"]) for e in ends) == [(r, -signal.SIGKILL, True) for r in (0, 2)]
    agent.stdin.close()
    assert agent.wait(30) == 1
