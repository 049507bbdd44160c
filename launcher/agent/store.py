"""The store of a run: torch's TCPStore in a process of the agent's, never in a rank. argv: listening fd, host, port."""

from __future__ import annotations

import sys


def main() -> None:
    from torch.distributed import TCPStore

    descriptor, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    sys.stdin.read()  # until the agent closes the pipe or ends this process
    del store


if __name__ == "__main__":
    main()
