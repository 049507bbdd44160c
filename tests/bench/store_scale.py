"""A run's store with a client for each of many ranks, as an agent starts it: time, memory and open files.

    python -m tests.bench.store_scale [--ranks 10000]

All clients live in this process, connected 64 at a time; each writes a key and reads its neighbour's, as ranks do.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
from torch.distributed import TCPStore

from hetctl.comm.contract.units import MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=10_000)
    ranks = parser.parse_args().ranks
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, descriptor = listener.getsockname()[1], listener.fileno()
    argv = [sys.executable, "-P", "-m", "hetctl.launcher.agent.store", str(descriptor), "127.0.0.1", str(port)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # as most systems start a process
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(descriptor,))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener.close()
    try:
        print(json.dumps(meet(ranks, port, psutil.Process(server.pid))))
    finally:
        server.kill()
        server.wait()


def meet(ranks: int, port: int, server: psutil.Process) -> dict[str, float]:
    """Connect all, and have each say a word and hear its neighbour's. Returns the figures."""
    begin = time.monotonic()
    connect = lambda _: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # noqa: E731
    with ThreadPoolExecutor(64) as threads:  # a connection waits 80 ms for answers: ranks do so side by side
        clients = list(threads.map(connect, range(ranks)))
    connected = time.monotonic()
    for rank, client in enumerate(clients):
        client.set(f"address/{rank}", "127.0.0.1:12345")
    for rank, client in enumerate(clients):
        assert client.get(f"address/{(rank + 1) % ranks}") == b"127.0.0.1:12345"
    met = time.monotonic()
    spent = server.cpu_times()
    return {
        "ranks": ranks,
        "connect_s": round(connected - begin, 2),
        "set_and_get_s": round(met - connected, 2),
        "server_cpu_s": round(spent.user + spent.system, 2),
        "server_rss_mib": round(server.memory_info().rss / MiB, 1),
        "server_fds": server.num_fds(),
    }


if __name__ == "__main__":
    main()
