"""Messages both ways and sums between two ranks over `het`, checked byte for byte."""

import time

import torch
import torch.distributed as dist

COUNT = (9 << 20) // 4 + 7  # floats: two chunks and a bit


def main() -> None:
    dist.init_process_group("het")
    rank = dist.get_rank()
    began = time.monotonic()
    mine, theirs = torch.arange(COUNT, dtype=torch.float32) + rank, torch.empty(COUNT)
    works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
    for work in works:
        work.wait()
    assert torch.equal(theirs, torch.arange(COUNT, dtype=torch.float32) + 1 - rank), "a message changed"
    for size in (3, 1 << 20):
        total = torch.arange(size, dtype=torch.int64) + rank
        dist.all_reduce(total)
        assert torch.equal(total, 2 * torch.arange(size, dtype=torch.int64) + 1), f"a sum of {size} is wrong"
    print(f"rank {rank}: all as it should be, in {time.monotonic() - began:.1f} s", flush=True)
    dist.destroy_process_group()


main()
