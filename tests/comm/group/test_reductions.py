"""Which reductions of which tensors are done, and which are refused, before anything is sent, by a usable group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.group.reductions import check
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


OPS = dist.ReduceOp
VALUE = 20_001  # two of them are more than an int16
LARGE = 70_001  # elements: above the flat path
REFUSED = [
    (torch.uint16, OPS.SUM),
    (torch.float8_e4m3fn, OPS.MAX),
    (torch.float8_e5m2, OPS.SUM),
    (torch.bool, OPS.AVG),
    (torch.float32, OPS.BXOR),
    (torch.complex64, OPS.PRODUCT),
    (torch.int32, dist._make_nccl_premul_sum(0.5)),
]


def refused(rank: int) -> None:
    world = dist.get_world_size()
    for count in (4, LARGE):
        for dtype, op in REFUSED:
            data = torch.ones(count * world).to(dtype)
            with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
                dist.reduce_scatter_tensor(torch.empty(count, dtype=dtype), data, op)
            if not dtype.is_complex:  # torch itself refuses, as a ValueError
                with pytest.raises(TypeError, match="cannot be reduced with"):
                    dist.all_reduce(data, op)
                with pytest.raises(TypeError, match="cannot be reduced with"):
                    dist.reduce(data, 0, op)
    dist.all_reduce(data := torch.ones(LARGE))
    assert bool((data == world).all())


def short(rank: int) -> None:
    world = dist.get_world_size()
    for count in (4, LARGE):
        for op, want in ((OPS.SUM, VALUE * world), (OPS.MAX, VALUE), (OPS.PRODUCT, VALUE**world)):
            wanted = (want + 2**15) % 2**16 - 2**15  # what does not fit wraps round
            made = torch.full((count * world,), VALUE, dtype=torch.int16)
            dist.all_reduce(data := made.clone(), op)
            assert bool((data == wanted).all()), (count, op)
            dist.reduce(data := made.clone(), 0, op)
            assert bool((data == (wanted if rank == 0 else VALUE)).all()), (count, op)
            dist.reduce_scatter_tensor(out := torch.empty(count, dtype=torch.int16), made, op)
            assert bool((out == wanted).all()), (count, op)
            parts = [made[: r + count] for r in range(world)]  # unequal
            dist.reduce_scatter(out := torch.empty(rank + count, dtype=torch.int16), parts, op)
            assert bool((out == wanted).all()), (count, op)


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: "+".join(map(str, s)))
def test_what_a_dtype_does_not_allow_is_refused_alike_and_the_group_goes_on(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, refused, seconds=20)


@pytest.mark.parametrize("sizes", [*SHAPES, (3, 2)], ids=lambda s: "+".join(map(str, s)))
def test_int16_is_reduced_though_native_libraries_do_not_know_it(sizes: tuple[int, ...]) -> None:
    on_islands(sizes, short, seconds=20)


def test_libraries_of_devices_combine_no_bits() -> None:
    data = torch.empty(2, dtype=torch.int32, device="meta")  # stands for a device
    check(OPS.BOR, data, alone=True, device_types=frozenset({"meta"}))
    check(OPS.SUM, data, alone=False, device_types=frozenset({"meta"}))
    with pytest.raises(TypeError, match="combine no bits"):
        check(OPS.BOR, data, alone=False, device_types=frozenset({"meta"}))
