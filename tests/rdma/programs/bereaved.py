"""Rank 1 is killed while a message is on its way to it; what rank 0 is told, after how long, and what it keeps."""

import os
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist

COUNT = 16 << 20  # bytes: several slots, so that one is always on its way
SECONDS = 3.0  # of messages, behind the first one, which starts the engines


def main() -> None:
    dist.init_process_group("het")
    data = torch.ones(COUNT, dtype=torch.uint8)
    if dist.get_rank() == 1:
        dist.recv(data, 0)
        threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            dist.recv(data, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run is ended; what the bridge says is wanted all the same
    dist.send(data, 1)
    began, said = time.monotonic(), "nothing was noticed"
    try:
        for _ in range(1000):
            began = time.monotonic()
            dist.send(data, 1)
    except RuntimeError as error:
        said = str(error)
    told = f"told after {time.monotonic() - began:.0f} s: {said}"
    print(told, flush=True)
    dist.destroy_process_group()
    shown = subprocess.run(["rdma", "resource", "show", "mr"], capture_output=True, text=True, check=True).stdout
    kept = [line for line in shown.splitlines() if f" pid {os.getpid()} " in line]
    print(f"kept {len(kept)} of {len(shown.splitlines())} registrations; {told}", flush=True)


main()
