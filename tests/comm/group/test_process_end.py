"""A program that ends without a word to its group ends with its own exit code, whatever the store does meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hetctl.comm.contract import variables
from tests.comm.spawn import placement_of

STOPPED_S = 4.0  # longer than what is being sent is waited for
RANK = """
import os, sys, time
import torch, torch.distributed as dist
from hetctl.comm.group.autoload import register

register()
dist.init_process_group("het", store=dist.TCPStore("127.0.0.1", int(sys.argv[2])), rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(value := torch.ones(4))
assert value[0] == 2
print("summed", flush=True)
sys.stdin.read()  # until the store is stopped
time.sleep(1.5)  # a thread asks it every half second
"""


def test_a_store_that_answers_late_aborts_nobody_who_ends(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text(placement_of((1, 1)).to_json())
    env = {**os.environ, variables.PLACEMENT: str(tmp_path / "placement.json")}
    serve = "import torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    serve += "; print(s.port, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", serve], **pipes) as store:  # type: ignore[call-overload]
        assert store.stdout is not None
        port = store.stdout.readline().strip()
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(n), port], env=env, stderr=subprocess.PIPE, **pipes)  # type: ignore[call-overload]
            for n in range(2)
        ]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == "summed\n"
            store.send_signal(signal.SIGSTOP)
            for rank in ranks:
                rank.stdin.close()
            time.sleep(1.5 + STOPPED_S)
        finally:
            store.send_signal(signal.SIGCONT)
        try:
            ended = [(rank.wait(60), rank.stderr.read()) for rank in ranks]
        finally:
            for process in (store, *ranks):
                process.kill()
    assert [code for code, _ in ended] == [0, 0], ended
