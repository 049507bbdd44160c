"""Every collective across islands of several shapes, against values that each rank can work out for itself."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from hetctl.comm.bridge import shm
from hetctl.comm.bridge.lane_end import Flow
from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.placement import PlacedBridge
from hetctl.comm.contract.units import KiB, MiB
from tests.comm.spawn import on_islands

SHAPES = [(1, 1), (2, 1), (1, 1, 1), (2, 3)]
LARGE = 70_001  # elements: above the flat path, no multiple of anything
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ by rank and place, small enough that every dtype sums them exactly."""
    return ((torch.arange(torch.Size(shape).numel()) % 5 + rank + 1) % 7).to(dtype).view(shape)


def total(op: str, world: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stack = torch.stack([mine(r, *shape).double() for r in range(world)])
    return getattr(stack, op)(0).to(dtype) if op in ("sum", "prod", "mean") else getattr(stack, op)(0).values.to(dtype)


def reductions(rank: int) -> None:
    world, ops = dist.get_world_size(), dist.ReduceOp
    for count in (0, 1, 13, LARGE):
        for dtype in DTYPES:
            data = mine(rank, count, dtype=dtype)
            dist.all_reduce(data)
            assert torch.equal(data, total("sum", world, count, dtype=dtype)), (count, dtype)
        for op, name in ((ops.MAX, "max"), (ops.MIN, "min"), (ops.PRODUCT, "prod")):
            if count:
                data = mine(rank, count, dtype=torch.float64)
                dist.all_reduce(data, op)
                assert torch.equal(data, total(name, world, count, dtype=torch.float64)), (count, name)
        data = mine(rank, count)
        dist.all_reduce(data, ops.AVG)
        torch.testing.assert_close(data, total("mean", world, count))
        data = mine(rank, count)
        dist.all_reduce(data, dist._make_nccl_premul_sum(0.5))
        assert torch.equal(data, total("sum", world, count) * 0.5)
        for op, fold in ((ops.BAND, "bitwise_and"), (ops.BOR, "bitwise_or"), (ops.BXOR, "bitwise_xor")):
            data, want = mine(rank, count, dtype=torch.int32), mine(0, count, dtype=torch.int32)
            for other in range(1, world):
                want = getattr(want, fold)(mine(other, count, dtype=torch.int32))
            dist.all_reduce(data, op)
            assert torch.equal(data, want), (count, op)
        for root in range(world):
            data = mine(rank, count)
            dist.reduce(data, root)
            assert torch.equal(data, total("sum", world, count) if rank == root else mine(rank, count))
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False, True]


def scattered_reductions(rank: int) -> None:
    world = dist.get_world_size()
    for count in (3, LARGE // 7, 40 * LARGE):  # the last in several spans
        want = total("sum", world, world, count)[rank]
        out = torch.empty(count)
        dist.reduce_scatter(out, list(mine(rank, world, count)))
        assert torch.equal(out, want)
        out = torch.empty(count, requires_grad=True)
        dist.reduce_scatter_tensor(out, mine(rank, world * count), async_op=True).wait()
        assert torch.equal(out.detach(), want)
        dist.reduce_scatter_tensor(out := torch.empty(count), mine(rank, world * count), op=dist.ReduceOp.AVG)
        torch.testing.assert_close(out, want / world)
        whole = mine(rank, world * count)  # into its own block
        dist.reduce_scatter_tensor(whole[rank * count :][:count], whole)
        assert torch.equal(whole[rank * count :][:count], want)
        dist.reduce_scatter_tensor(out, mine(rank, world * count), op=dist._make_nccl_premul_sum(0.5))
        assert torch.equal(out, want * 0.5)
        blocks = list(mine(rank, world, count))  # into the first one, whosever it is
        dist.reduce_scatter(blocks[0], blocks)
        assert torch.equal(blocks[0], want)
        with pytest.raises(ValueError, match="elements"):
            dist.reduce_scatter_tensor(torch.empty(count + 1), mine(rank, world * count))
        dist.reduce_scatter_tensor(out, mine(rank, world * count), op=dist.ReduceOp.MAX)
        assert torch.equal(out, total("max", world, world, count)[rank])
        sizes = [count + r for r in range(world)]  # unequal blocks
        parts = [mine(rank, n) for n in sizes]
        dist.reduce_scatter(out := torch.empty(sizes[rank]), parts)
        assert torch.equal(out, total("sum", world, sizes[rank]))


def copies(rank: int) -> None:
    world = dist.get_world_size()
    for count in (0, 5, LARGE, 40 * LARGE):
        for root in range(world if count <= LARGE else 0):
            data = mine(rank, count, dtype=torch.complex64)
            dist.broadcast(data, root)
            assert torch.equal(data, mine(root, count, dtype=torch.complex64))
            outs = [torch.empty(count) for _ in range(world)] if rank == root else None
            dist.gather(mine(rank, count), outs, dst=root)
            assert outs is None or all(torch.equal(t, mine(r, count)) for r, t in enumerate(outs))
            out = torch.empty(count)
            dist.scatter(out, [mine(r, count) for r in range(world)] if rank == root else None, src=root)
            assert torch.equal(out, mine(rank, count))
        outs = [torch.empty(2, count).t() for _ in range(world)]  # not contiguous
        dist.all_gather(outs, mine(rank, count, 2))
        assert all(torch.equal(t, mine(r, count, 2)) for r, t in enumerate(outs))
        whole = torch.empty(world, count, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, mine(rank, count, dtype=torch.bfloat16))
        assert all(torch.equal(whole[r], mine(r, count, dtype=torch.bfloat16)) for r in range(world))
        whole = torch.zeros(world, count)
        whole[rank] = mine(rank, count)
        dist.all_gather_into_tensor(whole, whole[rank])  # out of its own block
        assert all(torch.equal(whole[r], mine(r, count)) for r in range(world))
    for root in (0, world - 1):  # in several pieces
        data = mine(rank, 40 * LARGE, 2)
        dist.broadcast(data.t(), root)
        assert torch.equal(data, mine(root, 40 * LARGE, 2))
    ones = [torch.empty(2)[::2] for _ in range(world)]  # a single element of whatever stride
    dist.all_gather(ones, torch.full((2,), float(rank))[::2])
    assert [float(t) for t in ones] == list(range(world))
    sizes = [r + 1 for r in range(world)]
    outs = [torch.empty(n) for n in sizes]
    dist.all_gather(outs, mine(rank, sizes[rank]))
    assert all(torch.equal(t, mine(r, sizes[r])) for r, t in enumerate(outs))


def all_to_alls(rank: int) -> None:
    world = dist.get_world_size()
    out = torch.empty(world * 2)
    dist.all_to_all_single(out, torch.arange(world * 2.0) + 100 * rank)
    assert out.tolist() == [100.0 * r + 2 * rank + k for r in range(world) for k in range(2)]
    gives, takes = [(rank + r) % 3 for r in range(world)], [(rank + r) % 3 for r in range(world)]
    out = torch.empty(sum(takes), 2)
    dist.all_to_all_single(out, torch.full((sum(gives), 2), float(rank)), takes, gives)
    assert torch.equal(out[:, 0], torch.repeat_interleave(torch.arange(float(world)), torch.tensor(takes)))
    outs = [torch.empty(r + rank + 1) for r in range(world)]
    dist.all_to_all(outs, [torch.full((rank + r + 1,), float(rank)) for r in range(world)])
    assert all((t == r).all() for r, t in enumerate(outs))


def objects_and_functions(rank: int) -> None:
    world = dist.get_world_size()
    found: list[object] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "pad": "x" * rank * 100})
    assert [f["rank"] for f in found] == list(range(world))  # type: ignore[index]
    word = ["from the last" if rank == world - 1 else None]
    dist.broadcast_object_list(word, src=world - 1)
    assert word == ["from the last"]
    taken: list[object] = [None]
    dist.scatter_object_list(taken, list(range(world)) if rank == 0 else None, src=0)
    assert taken == [rank]
    group = dist.group.WORLD
    assert torch.equal(functional.all_reduce(mine(rank, 9), "sum", group) + 0, total("sum", world, 9))
    gathered = functional.all_gather_tensor(mine(rank, 3), 0, group)
    assert torch.equal(gathered + 0, torch.cat([mine(r, 3) for r in range(world)]))
    part = functional.reduce_scatter_tensor(mine(rank, world * 3), "sum", 0, group)
    assert torch.equal(part + 0, total("sum", world, world, 3)[rank])
    assert torch.equal(functional.broadcast(mine(rank, 4), 1, group) + 0, mine(1, 4))
    swapped = functional.all_to_all_single(torch.arange(world * 1.0), None, None, group)
    assert (swapped + 0).tolist() == [float(rank)] * world


def messages(rank: int) -> None:
    world = dist.get_world_size()
    last = world - 1
    counts = {0: 1, 1: LARGE, 2: 3_000_000, 3: 0}  # the third travels in several chunks
    if rank == 0:
        for work in [dist.isend(mine(tag, n, dtype=torch.float64), last, tag=tag) for tag, n in counts.items()]:
            work.wait()
    elif rank == last:
        got = {tag: torch.zeros(n, dtype=torch.float64, requires_grad=tag == 1) for tag, n in counts.items()}
        for work in [dist.irecv(got[tag].detach(), 0, tag=tag) for tag in (3, 2, 1, 0)]:
            work.wait()
        assert all(torch.equal(got[tag].detach(), mine(tag, n, dtype=torch.float64)) for tag, n in counts.items())
    left, right = (rank - 1) % world, (rank + 1) % world
    column = torch.zeros(4, 3)[:, 1]
    sent, got_from_left = mine(rank, 4), torch.empty(4)
    ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got_from_left, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got_from_left, mine(left, 4))
    if rank == 0:
        dist.send(mine(0, 4), last)
        assert dist.recv(torch.empty(1), last) == last
    elif rank == last:
        dist.recv(column, 0)
        assert torch.equal(column, mine(0, 4))
        dist.send(torch.ones(1), 0)
    columns(rank, (rank - 1) % world, (rank + 1) % world)


def columns(rank: int, left: int, right: int) -> None:
    """Strided memory on both ends, also between neighbours of one island."""
    sent = dist.isend(mine(rank, 5, 3)[:, 2], right)
    table = torch.zeros(5, 3)
    work = dist.irecv(table[:, 1], left)
    work.wait()
    sent.wait()
    assert torch.equal(table[:, 1], mine(left, 5, 3)[:, 2])
    assert not table[:, [0, 2]].any()


def from_anybody(rank: int) -> None:
    world = dist.get_world_size()
    for round in range(2):
        if rank == 0:
            works = [(data := torch.empty(3), dist.irecv(data)) for _ in range(world - 2)]
            first = torch.empty(3)
            sources = [dist.recv(first)]
            for data, work in works:
                work.wait()
                sources.append(int(data[0]))
                assert work.source_rank() == int(data[0])
            assert sorted(sources) == list(range(1, world))
            assert int(first[0]) == sources[0]
            dist.barrier()
            named = torch.empty(3)
            dist.recv(named, world - 1)  # by name, after receives from anybody were posted to it
            assert named.tolist() == [10.0 + round] * 3
        else:
            dist.send(torch.full((3,), float(rank)), 0)
            dist.barrier()
            if rank == world - 1:
                dist.send(torch.full((3,), 10.0 + round), 0)
        dist.barrier()


def sparse_sums(rank: int) -> None:
    world = dist.get_world_size()
    places = torch.tensor([[0, rank, 2]]) if rank else torch.empty(1, 0, dtype=torch.int64)
    data = torch.sparse_coo_tensor(places, torch.ones(places.size(1), 2), (world + 3, 2))
    dist.all_reduce(data)
    want = torch.zeros(world + 3, 2)
    for other in range(1, world):
        for place in (0, other, 2):
            want[place] += 1
    assert torch.equal(data.to_dense(), want)


def groups(rank: int) -> None:
    world = dist.get_world_size()
    ends = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        data = torch.ones(3)
        dist.all_reduce(data, group=ends)
        assert data.tolist() == [2.0] * 3
        assert type(ends).__name__ == "HetGroup"
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert type(alone) is dist.ProcessGroup
    works, tensors = [], [torch.full((LARGE,), float(k)) for k in range(4)]
    for data in tensors:  # several in flight on two groups, waited for backwards
        works.append(dist.all_reduce(data, async_op=True))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    assert all((data == k * world).all() for k, data in enumerate(tensors))
    future = dist.all_reduce(tensors[1], async_op=True).get_future()
    assert torch.equal(future.then(lambda f: f.value()[0] + 1).wait(), torch.full((LARGE,), 1.0 * world * world + 1))
    with dist._coalescing_manager():
        dist.all_reduce(small := torch.ones(3))
        dist.all_reduce(other := torch.ones(5) * 2)
    assert small.tolist() == [world] * 3
    assert other.tolist() == [2 * world] * 5


def everything(rank: int) -> None:
    for part in (
        reductions,
        scattered_reductions,
        copies,
        all_to_alls,
        objects_and_functions,
        messages,
        sparse_sums,
        groups,
        from_anybody,
    ):
        part(rank)


@pytest.mark.parametrize(
    "sizes",
    [*SHAPES[:2], *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SHAPES[2:])],
    ids=lambda s: "+".join(map(str, s)),
)
def test_every_operation_across_islands(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, everything)


def shared(rank: int) -> list[str]:
    messages(rank)
    reductions(rank)
    dist.barrier()
    dist.destroy_process_group()
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _alive(fd)]
    mapped = Path("/proc/self/maps").read_text()
    dist.init_process_group("het", rank=0, world_size=1, store=dist.HashStore())  # for the harness to destroy
    return [name for name in [*held, mapped] if "hetctl-ring" in name]


def _alive(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=lambda s: "+".join(map(str, s)))
def test_shared_memory_carries_the_same_and_leaves_nothing_behind(sizes: tuple[int, ...]) -> None:
    bridges = (PlacedBridge(("island0", "island1"), "shm"),)
    assert on_islands(sizes, shared, broken=True, bridges=bridges) == [[]] * sum(sizes)


def in_a_small_ring(rank: int) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setattr(shm, "SUMS", Flow(64 * KiB, window=2))
    data = torch.full((MiB,), rank + 1.0)
    dist.all_reduce(data)
    assert bool((data == 3).all())


def test_a_span_may_be_larger_than_what_its_lane_holds() -> None:
    """What lands waits for the outgoing copy of the same bytes, not of all: else both ends' rings stay full."""
    bridges = (PlacedBridge(("island0", "island1"), "shm"),)
    on_islands((1, 1), in_a_small_ring, bridges=bridges, seconds=20)


def over_unequal_rails(rank: int) -> None:
    os.environ["HETCTL_RAILS"] = str(rank + 2)
    messages(rank)
    reductions(rank)


def test_ends_with_unequal_numbers_of_rails() -> None:
    on_islands((1, 1), over_unequal_rails)


def huge(rank: int) -> None:
    data = torch.empty(2**31 + 2**20 + 3, dtype=torch.uint8)
    data[::4096], data[-1] = rank + 1, rank + 7
    if rank == 0:
        dist.send(data, 1)
    else:
        got = torch.empty_like(data)
        dist.recv(got, 0)
        assert bool((got[::4096] == 1).all())
        assert got[-1] == 7
        del got
    dist.all_reduce(data)
    assert bool((data[:-1][::4096] == 3).all())
    assert data[-1] == 15


@pytest.mark.large
@pytest.mark.skipif(not os.environ.get("HETCTL_LARGE"), reason="set HETCTL_LARGE=1: needs about 12 GiB of memory")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_more_than_two_gibibytes(transport: TransportKind) -> None:
    on_islands((1, 1), huge, seconds=200, bridges=(PlacedBridge(("island0", "island1"), transport),))


def many_at_once(rank: int) -> None:
    """A random program, the same on all ranks: large and small sums in flight, over common memory too, and others."""
    world, choose = dist.get_world_size(), random.Random(5)
    for _ in range(6):
        data = torch.ones(5 * LARGE, dtype=torch.float64)
        want, works = data.clone(), []
        for _ in range(12):
            first = choose.choice([0, LARGE, 2 * LARGE, 3 * LARGE])
            part = slice(first, first + choose.choice([7, LARGE, 2 * LARGE]))
            kind = choose.choice(
                ["sum", "sum", "sum", "columns", "average", "reduce", "broadcast", "scatter", "gather"]
            )
            root = choose.randrange(world)
            if kind == "sum":
                works.append(dist.all_reduce(data[part], async_op=True))
                want[part] *= world
            elif kind == "columns":  # not contiguous: copied there and back
                works.append(dist.all_reduce(data[part][::2], async_op=True))
                want[part][::2] *= world
            elif kind == "average":
                works.append(dist.all_reduce(data[part], dist.ReduceOp.AVG, async_op=True))
            elif kind == "reduce":
                works.append(dist.reduce(data[part], root, async_op=True))
                want[part] *= world if rank == root else 1
                # others' values stay as they were: next, everybody has the root's
                works.append(dist.broadcast(data[part], root, async_op=True))
                want[part] *= 1 if rank == root else world
            elif kind in ("scatter", "gather"):  # as optimisers that are shared out do
                block = (part.stop - part.start) // world
                whole = data[first : first + block * world]
                own = whole[rank * block :][:block]
                if kind == "scatter":
                    works.append(dist.reduce_scatter_tensor(own, whole, async_op=True))
                    want[first : first + block * world] *= world
                works.append(dist.all_gather_into_tensor(whole, own, async_op=True))
            else:
                works.append(dist.broadcast(data[part], root, async_op=True))
        for work in choose.sample(works, len(works)):
            work.wait()
        torch.testing.assert_close(data, want, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [*SHAPES, (2, 2), (2, 1, 2)], ids=lambda s: "+".join(map(str, s)))
def test_many_in_flight_keep_the_order_of_the_program(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, many_at_once)
