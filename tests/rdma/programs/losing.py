"""Messages both ways between two ranks over `het` for a while, checked byte for byte, whatever becomes of a rail."""

import time

import torch
import torch.distributed as dist

COUNT = (9 << 20) // 4 + 7  # floats: two chunks and a bit
SECONDS = 30.0  # behind the first round, which starts the engines


def main() -> None:
    dist.init_process_group("het")
    rank, end, number = dist.get_rank(), 0.0, 0
    more = torch.ones(1)
    while more.item():
        mine = torch.arange(COUNT, dtype=torch.float32) + rank + number
        theirs = torch.empty(COUNT)
        for work in [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]:
            work.wait()
        assert torch.equal(theirs, torch.arange(COUNT, dtype=torch.float32) + 1 - rank + number), "a message changed"
        number += 1
        end = end or time.monotonic() + SECONDS
        print(f"round {number} is over", flush=True)
        more = torch.tensor([float(rank == 0 and time.monotonic() < end)])
        dist.all_reduce(more)
    print(f"rank {rank}: all as it should be", flush=True)
    dist.destroy_process_group()


main()
