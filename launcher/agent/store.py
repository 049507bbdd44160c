"""The store of a run: torch's TCPStore in a process of the agent's, never in a rank. argv: listening fd, host, port."""

from __future__ import annotations

import resource
import sys

OF_RANK = 2  # connections: NCCL's watchdog opens one of its own
OTHERS = 256  # of the process itself


def check_open_files(ranks: int) -> None:
    """Raise OSError where this host's users may not open as many files as the store of so many ranks needs."""
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], ranks * OF_RANK + OTHERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(None, f"the store of {ranks:,} ranks needs {needed:,} open files, and {hard:,} are allowed there")


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # most systems give 1,024 until they are asked for more
    from torch.distributed import TCPStore

    descriptor, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    sys.stdin.read()  # until the agent closes the pipe or ends this process
    del store


if __name__ == "__main__":
    main()
