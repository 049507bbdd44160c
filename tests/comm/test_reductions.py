"""Which reductions of which tensors are done, and which are refused, before anything is sent, by a usable group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.comm.spawn import on_islands

SHAPES = [(1, 1), (2, 1)]


def sparse_others(rank: int) -> None:
    world = dist.get_world_size()
    data = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0]), (world,))
    for op in (dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
        with pytest.raises(ValueError, match="SUM and AVG"):
            dist.all_reduce(data, op)
    dist.all_reduce(data, dist.ReduceOp.AVG)
    want = torch.full((world,), 2.0)
    want[0] += world
    torch.testing.assert_close(data.to_dense(), want / world)


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: "+".join(map(str, s)))
def test_sparse_tensors_are_summed_or_averaged_and_nothing_else(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, sparse_others, seconds=20)
