"""Arguments that no collective can serve are refused at the call, before anything is sent: the group goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.spawn import on_islands


def refused(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def careless(rank: int) -> None:
    warnings.simplefilter("ignore")
    world, some = dist.get_world_size(), torch.zeros(2)
    few, many = [some] * (world - 1), [some] * (world + 1)
    wide = torch.zeros(200_000, dtype=torch.float64)
    refused(TypeError, "one type", lambda: dist.all_gather_into_tensor(torch.zeros(world).int(), torch.ones(1)))
    refused(TypeError, "one type", lambda: dist.reduce_scatter_tensor(wide, torch.ones(200_000 * world)))
    for blocks in (few, many):
        refused(ValueError, f"for the {world} ranks", lambda blocks=blocks: dist.all_gather(blocks, some))
        refused(ValueError, f"for the {world} ranks", lambda blocks=blocks: dist.reduce_scatter(some, blocks))
        refused(ValueError, f"for the {world} ranks", lambda blocks=blocks: dist.all_to_all(blocks, blocks))
    refused(ValueError, "cannot hold", lambda: dist.all_gather([some] * world, torch.zeros(3)))
    if rank == 0:
        refused(ValueError, "cannot hold", lambda: dist.gather(some, [torch.zeros(3)] * world))
        refused(ValueError, f"for the {world} ranks", lambda: dist.scatter(some, many))
    odd = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
    refused(TypeError, "quantized", lambda: dist.broadcast(odd, 0))
    refused(ValueError, "itself", lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, some, rank)]))
    dist.all_reduce(total := torch.ones(3))
    assert total.tolist() == [world] * 3


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_arguments_that_do_not_fit_are_refused_and_the_group_goes_on(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, careless, seconds=20)


def reduction_for_options(rank: int) -> None:
    """As torchft calls a group's own methods."""
    group = dist.group.WORLD
    group.allreduce([most := torch.tensor([rank])], dist.ReduceOp.MAX).wait()
    assert most.tolist() == [dist.get_world_size() - 1]


def test_a_reduction_may_stand_for_options() -> None:
    on_islands((1, 1), reduction_for_options, seconds=20)


def large_halves(rank: int) -> None:
    for count in (3, 100_000):
        dist.all_reduce(mean := torch.full((count,), 60_000.0, dtype=torch.float16), dist.ReduceOp.AVG)
        assert torch.allclose(mean.float(), torch.full((count,), 60_000.0), rtol=2e-3)


def test_an_average_of_halves_does_not_pass_through_a_sum_that_they_cannot_hold() -> None:
    on_islands((1, 2), large_halves, seconds=20)


def another_size(rank: int) -> None:
    """Ranks 1 and 2 say how much they will send, to whoever takes it first; the payload has the same tag."""
    if rank:
        dist.send(torch.tensor([rank]), 0)
        dist.barrier()
        return
    other = 3 - dist.recv(torch.zeros(1, dtype=torch.int64))  # a receive stays posted to it
    refused(ValueError, "a tag of its own", lambda: dist.recv(torch.zeros(50), other))
    dist.recv(torch.zeros(1, dtype=torch.int64))
    dist.barrier()


def test_a_message_of_another_size_than_a_kept_receive_from_anybody_is_refused() -> None:
    on_islands((1, 2), another_size, seconds=20)
