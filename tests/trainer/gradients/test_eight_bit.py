"""Moments in 8 bits: the same codes after a round trip, as bitsandbytes' levels, training as AdamW does, resumed."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetctl.trainer.gradients import eight_bit
from hetctl.trainer.gradients.eight_bit import MOMENTS, AdamW8bit, EightBit, _levels
from hetctl.trainer.model.block_formats import MOMENT_BLOCK, MOMENT_BYTES
from tests.comm.spawn import on_islands
from tests.trainer.checkpoint.test_writer import ONE, REPLICAS, SHARDS, STAGES, part_of_run
from tests.trainer.parity import Trace

SIZE = 5 * MOMENT_BLOCK + 77
CPU = torch.device("cpu")


def moments(*, signed: bool, size: int = SIZE) -> Tensor:
    """Of magnitudes seven decades apart, some zero, one block of zeros, one whose extreme is below zero."""
    torch.manual_seed(0)
    values = torch.randn(size) * 10 ** (-7 * torch.rand(size))
    values[::13] = 0
    values[MOMENT_BLOCK : 2 * MOMENT_BLOCK] = 0
    values[3] = -9.0
    return values if signed else values**2


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_is_kept_as_the_nearest_level(signed: bool) -> None:
    values = moments(signed=signed)
    kept = EightBit(values, signed=signed)[:]
    levels = _levels(signed, CPU)
    for block, found in zip(values.split(MOMENT_BLOCK), kept.split(MOMENT_BLOCK), strict=True):
        extreme = block[block.abs().argmax()]
        nearest = levels[(block[:, None] / (extreme or 1) - levels).abs().argmin(1)] * extreme
        torch.testing.assert_close(found, nearest, rtol=1e-6, atol=0)
        assert extreme in found


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_read_comes_back_as_the_same_codes(signed: bool, dtype: torch.dtype) -> None:
    first = EightBit(moments(signed=signed).to(dtype), signed=signed)
    again = EightBit(first[:], signed=signed)
    assert first[:].dtype == dtype
    assert first.extremes.equal(again.extremes)
    assert first[:].equal(again[:])


def test_a_part_is_that_part_of_the_whole() -> None:
    kept = EightBit(moments(signed=True), signed=True)
    for part in (slice(0, 10), slice(250, 260), slice(MOMENT_BLOCK, 3 * MOMENT_BLOCK), slice(SIZE - 80, SIZE + 9)):
        assert kept[part].equal(kept[:][part])


def test_it_takes_the_bytes_that_plans_count() -> None:
    kept = EightBit(torch.zeros(64 * MOMENT_BLOCK), signed=True)
    assert kept.codes.nbytes + kept.extremes.nbytes == 64 * MOMENT_BLOCK * MOMENT_BYTES


def test_levels_are_those_of_bitsandbytes() -> None:
    """But for the zero of squares."""
    reason = "bitsandbytes is not installed: nothing to compare with"
    theirs = pytest.importorskip("bitsandbytes.functional", reason=reason).create_dynamic_map
    assert theirs(signed=True).equal(_levels(True, CPU))
    assert theirs(signed=False)[1:].equal(_levels(False, CPU))


def test_levels_are_a_dynamic_tree() -> None:
    """Section 2.2 of the paper: the more digits after the point, the fewer bits for the fraction; ends at 1."""
    for signed, count in ((True, 256), (False, 255)):
        levels = _levels(signed, CPU)
        assert len(levels) == count
        assert levels.max() == 1
        assert (0 in levels) == signed
        decades = [((levels > 10.0**-k) & (levels < 10.0 ** (1 - k))).sum().item() for k in range(1, 8)]
        assert decades == [2 ** (7 - k + (not signed)) for k in range(1, 8)]


def trained(kind: type[torch.optim.Optimizer], *, steps: int = 60, rare: bool = False) -> tuple[Tensor, list[float]]:
    """Least squares of 40 x 64 weights, of which `rare` ones have a gradient every eleventh step alone."""
    torch.manual_seed(1)
    master = torch.randn(40 * 64).requires_grad_()
    goal, inputs = torch.randn(40, 64), torch.randn(200, 64)
    groups = [{"params": [master], "weight_decay": 0.1, "is_small": False}]
    optimizer = kind(groups, lr=3e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)  # type: ignore[call-arg]
    losses = []
    for step in range(steps):
        loss = ((master.view(40, 64) - goal) @ inputs.T).square().mean()
        (master.grad,) = torch.autograd.grad(loss, master)
        if rare and step % 11:
            master.grad.view(40, 64)[20:] = 0
        optimizer.step()
        losses.append(loss.item())
    return master.detach(), losses


@pytest.mark.parametrize("rare", [False, True])
def test_it_trains_as_adamw_does(rare: bool) -> None:
    (wanted, full), (found, eight) = (trained(kind, rare=rare) for kind in (torch.optim.AdamW, AdamW8bit))
    assert eight == pytest.approx(full, rel=0.02)
    assert eight[0] == full[0]
    assert eight[-1] < 0.7 * eight[0]
    assert (found - wanted).abs().max() < 0.1 * (wanted - trained(AdamW8bit, steps=0)[0]).abs().max()


@pytest.mark.parametrize("zero", [False, True])
def test_a_small_gradient_followed_by_none_makes_a_small_update(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a level of zero for squares, as bitsandbytes has it, one beside a mean that is kept makes a huge one."""
    own = eight_bit._levels
    if zero:
        monkeypatch.setattr(
            eight_bit, "_levels", lambda s, d: own(s, d) if s else torch.cat((torch.zeros(1), own(s, d)))
        )
    master = torch.zeros(2).requires_grad_()
    optimizer = AdamW8bit([{"params": [master], "is_small": False}], lr=1.0, fused=True)
    for gradient in (1e-4, 0.0):
        master.grad = torch.tensor([1.0, gradient])
        optimizer.step()
    assert (master[1].abs() > 100) == zero


def test_parts_one_after_another_are_the_update_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = trained(AdamW8bit)
    monkeypatch.setattr(eight_bit, "AT_ONCE", 2 * MOMENT_BLOCK)
    in_parts = trained(AdamW8bit)
    assert in_parts[0].equal(at_once[0])


def eight_bits_of_run(rank: int, *about: object) -> Trace:
    return part_of_run(rank, *about, change=lambda r: replace(r, optimizer=replace(r.optimizer, name="adamw_8bit")))  # type: ignore[arg-type]


def test_a_run_resumed_is_the_uninterrupted_one_and_near_it_under_another_layout(tmp_path: Path) -> None:
    """Blocks begin where a rank's shard does, so that layouts round unlike."""

    def run(layout, name: str, first: int, last: int, part=eight_bits_of_run) -> list[float]:  # type: ignore[no-untyped-def]
        found = on_islands(tuple(map(len, layout.islands)), part, layout, str(tmp_path / name), first, last)
        return found[0].losses  # type: ignore[no-any-return]

    whole = run(STAGES, "whole", 0, 12)
    assert run(STAGES, "resumed", 0, 5) + run(STAGES, "resumed", 5, 12) == whole
    assert whole[1:] != run(STAGES, "full", 0, 12, part_of_run)[1:]
    others = [run(layout, "other", 3 * k, 3 * k + 3) for k, layout in enumerate((ONE, SHARDS, REPLICAS, ONE))]
    assert [*chain(*others)] == pytest.approx(whole, rel=5e-3)
    assert run(ONE, "whole", 12, 14, part_of_run) == pytest.approx(run(ONE, "full", 12, 14, part_of_run), rel=5e-3)


def test_moments_alone_are_smaller() -> None:
    small, large = (torch.ones(n).requires_grad_() for n in (300, SIZE))
    optimizer = AdamW8bit([{"params": [p], "is_small": p is small} for p in (small, large)], fused=True)
    for p in (small, large):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(isinstance(optimizer.state[small][kind], Tensor) for kind in MOMENTS)
    assert all(isinstance(optimizer.state[large][kind], EightBit) for kind in MOMENTS)
