"""Every operation that torchcomms hands to a back end in Python, once over `het`, with what it must give."""

from __future__ import annotations

import torch
import torchcomms
from torchcomms import ReduceOp

from hetctl.comm.contract.errors import ConfigError

STAND_IN = "stand_ins" in str(torchcomms.__file__)
if STAND_IN:
    import hetctl.torchcomms  # noqa: F401  # torchcomms itself finds it by its entry point

comm = torchcomms.new_comm("het", torch.device("cpu"), name="all")
rank, size = comm.get_rank(), comm.get_size()
everyone = [float(r) for r in range(size)]


def mine(count: int = 2) -> torch.Tensor:
    return torch.full((count,), float(rank))


def room(count: int = 2) -> torch.Tensor:
    return torch.full((count,), -1.0)


def same(found: torch.Tensor | list[torch.Tensor], *wanted: float) -> None:
    told = torch.cat(found) if isinstance(found, list) else found
    assert told.tolist() == list(wanted), (rank, told.tolist(), wanted)


for op, wanted in ((ReduceOp.SUM, sum(everyone)), (ReduceOp.MAX, size - 1.0), (ReduceOp.AVG, sum(everyone) / size)):
    for in_background in (False, True):
        value = mine()
        comm.all_reduce(value, op, in_background).wait()
        same(value, wanted, wanted)


def refused(factor: float | torch.Tensor) -> str:
    """What is said of a sum of multiplied tensors that cannot be made."""
    product = mine()
    try:
        comm.all_reduce(product, ReduceOp.PREMUL_SUM(factor), False)
    except ConfigError as error:
        return str(error)
    same(product, *[sum(everyone) / 2] * 2)
    return ""


for factor in (0.5, torch.full((1,), 0.5)):  # only torchcomms knows what it multiplies by
    assert ("needs torchcomms' own gloo" in refused(factor)) == STAND_IN

value = mine()
comm.broadcast(value, 1, False)
same(value, 1, 1)

value = mine()
comm.reduce(value, 1, ReduceOp.SUM, False)
same(value, *[sum(everyone) if rank == 1 else float(rank)] * 2)

blocks = [room() for _ in range(size)]
comm.all_gather(blocks, mine(), False)
same(blocks, *[r for r in everyone for _ in range(2)])

blocks = [room(r + 1) for r in range(size)]
comm.all_gather_v(blocks, mine(rank + 1), False)
same(blocks, *[r for r in everyone for _ in range(int(r) + 1)])

whole = room(2 * size)
comm.all_gather_single(whole, mine(), False)
same(whole, *[r for r in everyone for _ in range(2)])

out = room()
comm.reduce_scatter(out, [torch.full((2,), float(rank * r)) for r in range(size)], ReduceOp.SUM, False)
same(out, *[rank * sum(everyone)] * 2)

out = room(rank + 1)
comm.reduce_scatter_v(out, [torch.full((r + 1,), float(rank * r)) for r in range(size)], ReduceOp.SUM, False)
same(out, *[rank * sum(everyone)] * (rank + 1))

out = room(1)
comm.reduce_scatter_single(out, rank * torch.tensor(everyone), ReduceOp.SUM, False)
same(out, rank * sum(everyone))

out = room(size)
comm.all_to_all_single(out, 10.0 * rank + torch.tensor(everyone), False)
same(out, *[10 * r + rank for r in everyone])

out = room(sum(range(size + 1)))  # each sends every rank as many as its own number, and one
comm.all_to_all_v_single(out, mine(size * (rank + 1)), [r + 1 for r in range(size)], [rank + 1] * size, False)
same(out, *[r for r in everyone for _ in range(int(r) + 1)])

blocks = [room(1) for _ in range(size)]
comm.all_to_all(blocks, [torch.tensor([10.0 * rank + r]) for r in everyone], False)
same(blocks, *[10 * r + rank for r in everyone])

out = room()
comm.scatter(out, [torch.full((2,), 5 * r) for r in everyone] if rank == 1 else [], 1, False)
same(out, 5 * rank, 5 * rank)

blocks = [room() for _ in range(size)] if rank == 0 else []
comm.gather(blocks, mine(), 0, False)
if rank == 0:
    same(blocks, *[r for r in everyone for _ in range(2)])

out = room()
sent = comm.send(mine(), (rank + 1) % size, True)
comm.recv(out, (rank - 1) % size, False)
sent.wait()
same(out, *[float((rank - 1) % size)] * 2)

comm.barrier(False)

ends = comm.split([size - 1, 0] if rank in (0, size - 1) else [], "ends")  # in another order than they are in
assert (ends is None) == (rank not in (0, size - 1))
again = comm.split(list(range(size)), "ends")
if ends is not None:
    assert ends.get_rank() == (rank == 0)
    assert ends.get_size() == 2
    value = mine()
    ends.broadcast(value, 0, False)
    same(value, size - 1, size - 1)
    ends.finalize()
value = mine()
again.all_reduce(value, ReduceOp.SUM, False)
same(value, *[sum(everyone)] * 2)
again.finalize()

comm.finalize()
second = torchcomms.new_comm("het", torch.device("cpu"), name="all")  # a name is free again
second.barrier(False)
second.finalize()
print(f"rank {rank}: ok", flush=True)
