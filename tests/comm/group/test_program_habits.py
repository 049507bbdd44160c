"""Habits of programs that reach this back end's own threads: inference mode, default devices, callbacks, futures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.spawn import on_islands


def inferring(rank: int) -> None:
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    with torch.inference_mode():
        for count in (1, 100_000):
            dist.all_reduce(total := torch.ones(count))
            work = dist.all_reduce(later := torch.ones(count), async_op=True)
            work.wait()
            dist.broadcast(given := torch.full((count,), float(rank)), 0)
            dist.all_gather(every := [torch.empty(count) for _ in range(world)], torch.full((count,), float(rank)))
            dist.reduce_scatter_tensor(mine := torch.empty(count), torch.ones(count * world))
            assert [float(t[-1]) for t in (total, later, given, mine)] == [world, world, 0, world]
            assert [float(t[-1]) for t in every] == list(range(world))
        dist.all_gather_object(ranks := [None] * world, rank)
        assert ranks == list(range(world))
        message = torch.ones(4, 4) if rank == 0 else torch.zeros(4, 4).t()
        for peer in range(1, world) if rank == 0 else ():
            dist.send(message, peer)
        if rank:
            dist.recv(message, 0)
        assert message.sum() == 16


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_tensors_made_in_inference_mode_are_received_into(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, inferring, seconds=20)


def chained(rank: int) -> None:
    with torch.inference_mode():
        data = torch.ones(70_000)
    future = dist.all_reduce(data, async_op=True).get_future()
    made = future.then(lambda _: torch.ones(2, requires_grad=True)).wait()
    made.sum().backward()  # an inference tensor has no gradients


def test_callbacks_make_tensors_of_the_programs_own_kind() -> None:
    on_islands((1, 1), chained, seconds=20)


def nested(rank: int) -> str:
    first, second = torch.ones(5), torch.ones(5)
    if rank == 0:
        time.sleep(0.3)  # so that the other one's callback is there before its operation has ended

    def then(_: Any) -> torch.Tensor:
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="in a callback of another collective"):
        dist.all_reduce(first, async_op=True).get_future().then(then).wait()
    dist.all_reduce(first)


def test_a_collective_in_a_callback_is_refused_instead_of_waiting_for_itself() -> None:
    on_islands((1, 1), nested, seconds=20)


def built_elsewhere(rank: int) -> None:
    with torch.device("meta"):
        dist.barrier()


def test_a_barrier_does_not_mind_the_default_device() -> None:
    on_islands((1, 1), built_elsewhere, seconds=20)


def awaited_by_future(rank: int) -> None:
    """Ranks 0 and 1 are one island."""
    if rank == 0:
        dist.isend(torch.ones(3), 1).get_future().wait()
    if rank == 1:
        dist.irecv(got := torch.zeros(3, 3).t()[0], 0).get_future().wait()
        assert got.tolist() == [1.0, 1.0, 1.0]


def test_messages_inside_an_island_of_host_tensors_have_futures() -> None:
    on_islands((2, 1), awaited_by_future, seconds=20)


def coalesced(rank: int) -> None:
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        outs = [torch.zeros(1_000_000 * world) for _ in range(2)]
        for out in outs:
            dist.all_gather_into_tensor(out, torch.ones(1_000_000))
    manager.works[0].get_future().wait()
    assert all((out == 1).all() for out in outs)
    assert manager.works[0].is_success()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_the_future_of_coalesced_operations_ends_with_them(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, coalesced, seconds=20)


def autograd_looks_on(rank: int) -> list[int]:
    """How often autograd has seen what collectives and receives wrote into."""
    world, seen = dist.get_world_size(), list[torch.Tensor]()
    for count in (6, 100_000):
        for made in (torch.ones, lambda n: torch.ones(2, n).t()[:, 0]):  # contiguous, or with gaps
            total, given, mine, whole = made(count), made(count), made(count), torch.ones(count * world)
            every = [made(count) for _ in range(world)]
            dist.all_reduce(total)
            dist.broadcast(given, 0)
            dist.reduce_scatter(mine, list(torch.ones(world, count)))
            dist.all_gather(every, torch.ones(count))
            dist.all_to_all_single(whole, torch.ones(count * world))
            for peer in range(1, world) if rank == 0 else ():
                dist.send(total, peer)
            if rank:
                dist.recv(given, 0)
            seen += [total, given, mine, whole, *every]
    return [t._version for t in seen]


def test_autograd_does_not_see_what_is_written_as_natively_it_does_not() -> None:
    """Where a program receives into views, such as blocks of a split, autograd would refuse their next use."""
    counted = on_islands((2, 1), autograd_looks_on, seconds=20)
    assert not any(n for of_rank in counted for n in of_rank)


@pytest.mark.parametrize(("told", "devices"), [("cpu", ["cpu"]), ("xpu", ["cpu", "xpu"]), ("", ["cpu", "cuda", "xpu"])])
def test_programs_see_the_devices_that_this_rank_was_given(told: str, devices: list[str]) -> None:
    """torch's ShardedTensor gathers on the group's device that is no host's; on hosts there is none to be asked for."""
    ask = "import torch.distributed as d; print(*d.BackendConfig(d.Backend('het')).get_device_backend_map())"
    env = {**os.environ, "HETCTL_DEVICE_TYPE": told}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == devices
